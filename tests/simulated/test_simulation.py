"""Service on simulated accelerators: what it calls them, and the failures of cards that it survives."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.device_child import child
from tests.support.load import WAIT_S, Load, until
from tests.support.photographs import FILES
from tests.support.service_process import running
from tests.support.small_classifier import PREDICT, written

PHOTO = FILES[0].read_bytes()
ONE = ("--batch-sizes", "1", "--models")


def test_a_service_on_simulated_devices_says_so_everywhere(tmp_path):
    with (
        running(tmp_path, *ONE, written(tmp_path), "--simulate", "npu:2", "--device", "npu") as service,
        service.client() as client,
    ):
        answer = client.post(PREDICT, content=PHOTO, headers={"Content-Type": "image/jpeg"}).json()
        assert answer["simulated"] is True
        assert answer["device"] in ("npu:0", "npu:1")
        assert (answer["engine"], answer["precision"]) == ("eager", "fp32")
        devices = client.get("/v1/devices").json()["devices"]
        assert [one["device"] for one in devices] == ["npu:0", "npu:1"]
        assert all(one["simulated"] and one["vendor"] == "simulated-ascend" for one in devices)
        assert all("Simulated" in one["name"] for one in devices)
        assert (
            'anychip_device_memory_bytes{device="npu:1",kind="total",vendor="simulated-ascend"}'
            in client.get("/metrics").text
        )
    assert "npu is simulated: the CPU computes its answers" in service.log.read_text()


async def test_a_lost_device_is_handed_over_and_nobody_notices(tmp_path):
    words = (*ONE, written(tmp_path), "--simulate", "mlu:1,lose=40", "--device", "mlu")
    with running(tmp_path, *words, fresh=True) as service:  # With the children and workers that people have.
        worker = service.worker()
        first = worker.pid
        # The server starts no process itself: it would stand still until the new program runs.
        assert any("main.fresh(" in word for word in worker.cmdline())
        async with Load(service.url, PREDICT, PHOTO, 4) as load:
            await load.answers(100)
        assert set(load.outcomes) == {(200, "OK")}
        await until(lambda: len(service.workers()) == 1 and service.worker().pid != first)
        # Each worker loses it anew after forty batches, those of its gate included.
        text = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        [lost] = re.findall(r'anychip_worker_restarts_total\{device="mlu:0",reason="lost"\} (\S+)', text)
        assert float(lost) >= 1
    assert "is lost" in service.log.read_text()


async def test_a_batch_without_memory_is_computed_all_the_same(tmp_path):
    # The gate has had eight.
    with running(tmp_path, *ONE, written(tmp_path), "--simulate", "npu:1,oom=14", "--device", "npu") as service:
        first = service.worker().pid
        async with Load(service.url, PREDICT, PHOTO, 2) as load:
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
        assert service.worker().pid == first
    assert "is tried again by itself: npu:0 has too little memory: NPU out of memory" in service.log.read_text()


# --- Failures that were recorded on cards: each ends in service, or in one sentence with a remedy

ANSWERS = "/v1/models/shufflenet_v2_x0_5:predict"
SHUFFLENET = ("--models", "shufflenet_v2_x0_5", "--weights", "random", "--batch-sizes", "1", "--engine", "auto")


def answered(client: httpx.Client, photograph: bytes) -> list[dict[str, Any]]:
    answer = client.post(ANSWERS, content=photograph, headers={"Content-Type": "image/jpeg"})
    assert answer.status_code == 200, answer.text
    classes: list[dict[str, Any]] = answer.json()["predictions"][0]["classes"]
    return classes


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
    options = (*SHUFFLENET, "--simulate", "npu:2,sick=1,graphs=1,fault=mem_get_info", "--device", "npu")
    with running(tmp_path, *options) as service, service.client() as client:
        [model] = client.get("/v1/models").json()["models"]
        assert model["served_on"][0]["engine"] == "graph"
        first, second = (answered(client, photograph) for photograph in (PHOTO, FILES[1].read_bytes()))
        assert first != second, "each image has its own answer, and not that of the capture"
        assert answered(client, PHOTO) == first
        total = 'anychip_device_memory_bytes{device="npu:0",kind="total",vendor="simulated-ascend"} 1.7179869184e+10'
        assert total in client.get("/metrics").text
        assert [each["device"] for each in client.get("/v1/devices").json()["devices"]] == ["npu:0"]
    assert "npu:1 does not answer and is left out: the device does not answer" in service.log.read_text()
