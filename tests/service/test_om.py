"""The service on Ascend's cards without torch_npu, over doubles of pyACL and atc: load, a lost card, a leak, verify."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import cann_double
from tests.support.constants import GUARD_COOLDOWN_S, HANDOVER_INTERVAL_S
from tests.support.images import GREY
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import metric
from tests.support.service_process import running

PREDICT = "/v1/models/resnet18:predict"


def knobs(folder: Path, **values: Any) -> None:
    """Set the behaviour of the double of pyACL in every process from now on."""
    new = folder / "knobs.new"
    new.write_text(json.dumps(values))
    os.replace(new, folder / "knobs.json")


@pytest.mark.nightly  # tests/simulated shows it of devices that torch reaches.
async def test_nobody_fails_when_a_card_is_lost_or_leaks(tmp_path: Path) -> None:
    knobs(tmp_path)
    options = ["--models", "resnet18:random", "--batch-sizes", "1,2", "--device", "npu"]
    options += ["--engine", "auto", "--precision", "auto"]
    options += ["--guard-policy", "0.4", "--cache-dir", str(tmp_path / "cache"), "--timeout-ms", "200000"]
    environment = cann_double.variables(ACL_DOUBLE_COUNT="1", ACL_DOUBLE_KNOBS=str(tmp_path / "knobs.json"))
    told = {"constants": {GUARD_COOLDOWN_S: 0, HANDOVER_INTERVAL_S: 0}, "environment": environment}
    with running(tmp_path, *options, **told) as service:  # type: ignore[arg-type]
        [model] = httpx.get(f"{service.url}/v1/models", timeout=WAIT_S).json()["models"]
        [found] = model["served_on"]
        assert (found["engine"], found["precision"], found["device"]) == ("om", "fp16", "npu:0")
        assert set(found["errors"]) == {"top1", "score", "cosine", "logit", "scale"}
        await until(lambda: len(service.workers()) == 1)  # One that was replaced meanwhile may still end.
        first = service.worker().pid
        async with Load(service.url, PREDICT, GREY, 4) as load:
            await load.answers(20)
            knobs(tmp_path, fail={"stream": 507015})
            await until(lambda: all(worker.pid != first for worker in service.workers()))
            knobs(tmp_path)
            await load.answers(20)
            assert metric(service, "anychip_worker_restarts_total", reason="lost") >= 1
            knobs(tmp_path, leak_bytes=32 << 20)
            await until(lambda: metric(service, "anychip_handovers_total", reason="memory") >= 1)
            knobs(tmp_path)
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
