"""Failures that were recorded on cards, on simulated ones: each ends in service, or in one sentence with a remedy."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.device_child import child
from tests.support.photographs import FILES
from tests.support.service_process import running

PHOTO = FILES[0].read_bytes()
PREDICT = "/v1/models/shufflenet_v2_x0_5:predict"
ONE = ("--models", "shufflenet_v2_x0_5", "--weights", "random", "--batch-sizes", "1", "--engine", "auto")
LOADING = """
import sys
from pathlib import Path
import torch
from backends import choose, simulated

class Net(torch.nn.Module):
    input_shape = (8, 8, 3)
    def __init__(self):
        super().__init__()
        self.core = torch.nn.Linear(1024, 4096)
    def cast(self, dtype):
        return self
    def forward(self, pixels):
        return (pixels.float().mean((1, 2, 3)),)

simulated.configure(sys.argv[1], "", Path(sys.argv[2]))
choose("npu").backend.load(Net(), "npu:0", "eager", "fp32", (1,))
"""


def served(client: httpx.Client) -> dict[str, Any]:
    [model] = client.get("/v1/models").json()["models"]
    return model["served_on"][0] if model["served_on"] else {"engine": "", "refusals": {}}


def answered(client: httpx.Client, photograph: bytes) -> list[dict[str, Any]]:
    answer = client.post(PREDICT, content=photograph, headers={"Content-Type": "image/jpeg"})
    assert answer.status_code == 200, answer.text
    classes: list[dict[str, Any]] = answer.json()["predictions"][0]["classes"]
    return classes


@pytest.mark.parametrize(
    ("simulation", "says"),
    [
        (
            "npu:1,fault=set_device",
            "BackendError: npu:0 failed: SetPrecisionMode.*500001 .*with CANN 8 this is numpy 2: pip install 'numpy<2'",
        ),
        (
            "npu:1,memory_mb=2048,others_mb=2040",
            "OutOfDeviceMemoryError: npu:0 has too little memory: NPU out of memory.*"
            "Other processes hold 2.0 of 2.0 GiB of npu:0: end them, or choose another device",
        ),
    ],
    ids=["numpy 2 beside CANN 8", "a card that is taken"],
)
def test_what_cannot_serve_says_why_and_what_to_do(simulation: str, says: str) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "anychip")
    ended = child(sys.executable, {}, "-c", LOADING, simulation, str(cache))
    assert re.search(says, ended.stderr.splitlines()[-1]), ended.stderr


@pytest.mark.parametrize(("count", "sick"), [(8, 3), (3, 0)])
def test_a_sick_card_among_several_is_left_out_with_its_reason(count: int, sick: int) -> None:
    """Card 0 as well, which torch_npu opens first, whichever it is asked about."""
    ended = child(sys.executable, {"ANYCHIP_SIMULATE": f"npu:{count},sick={sick}"}, "-m", "app", "devices", "--json")
    rows = {row["device"]: row for row in json.loads(ended.stdout) if row["device"].startswith("npu")}
    well = [f"npu:{index}" for index in range(count) if index != sick]
    assert [name for name, row in rows.items() if row["ok"]] == well
    assert "does not answer" in rows[f"npu:{sick}"]["detail"]


def test_captured_graphs_answer_beside_a_sick_card_though_nothing_says_what_memory_is_free(tmp_path: Path) -> None:
    """As Intel's client GPUs do not."""
    options = (*ONE, "--simulate", "npu:2,sick=1,graphs=1,fault=mem_get_info", "--device", "npu")
    with running(tmp_path, *options) as service, service.client() as client:
        assert served(client)["engine"] == "graph"
        first, second = (answered(client, photograph) for photograph in (PHOTO, FILES[1].read_bytes()))
        assert first != second, "each image has its own answer, and not that of the capture"
        assert answered(client, PHOTO) == first
        total = 'anychip_device_memory_bytes{device="npu:0",kind="total",vendor="simulated-ascend"} 1.7179869184e+10'
        assert total in client.get("/metrics").text
        assert [each["device"] for each in client.get("/v1/devices").json()["devices"]] == ["npu:0"]
    assert "npu:1 does not answer and is left out: the device does not answer" in service.log.read_text()
