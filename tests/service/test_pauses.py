"""Pauses under load with short deadlines: afterwards each model is answered as before, whichever part stood still."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.constants import DECODE_TIMEOUT_S, HEARTBEAT_TIMEOUT_S
from tests.support.images import GREY
from tests.support.null_service import metric
from tests.support.pauses import PARTS, goodput, hurried, part_paused

MODELS = ("resnet18", "resnet50", "mobilenet_v3_small")
PATIENT = ("--batch-timeout-s", "60", "--batch-sizes", "1,2")
CONSTANTS = {HEARTBEAT_TIMEOUT_S: 60, DECODE_TIMEOUT_S: 60}
LOOKS = "fail=999999999"
"""The device looks at its images, so that they are decoded."""


def serving(serve, models, delay_ms):
    return serve(f"delay_ms={delay_ms},{LOOKS}", "--models", ",".join(MODELS[:models]), *PATIENT, constants=CONSTANTS)


async def assert_answered_as_before(service, loads, part, pause_s, settle_s, measured_s):
    before = await goodput(loads, measured_s)
    await part_paused(service, part, pause_s)
    await asyncio.sleep(settle_s)
    refused = {model: load.outcomes[503, "DEADLINE_UNREACHABLE"] for model, load in loads.items()}
    after = await goodput(loads, measured_s)
    # A machine that has become busier meanwhile slows all of them alike.
    all_of_them = min(1.0, sum(after.values()) / sum(before.values()))
    assert all_of_them >= 0.5, (part, pause_s, before, after)
    for model, load in loads.items():
        assert after[model] >= 0.8 * all_of_them * before[model], (part, pause_s, before, after)
        more = load.outcomes[503, "DEADLINE_UNREACHABLE"] - refused[model]
        assert more <= 0.05 * measured_s * after[model], (part, pause_s, model, more)


async def test_after_each_pause_two_models_are_answered_as_before(serve):
    """Pauses of four seconds, deadlines of one. A model against which they were held had nothing for as long."""
    with serving(serve, 2, 25) as service:
        async with hurried(service, dict.fromkeys(MODELS[:2], GREY), 4, 1000) as loads:
            for part in PARTS:
                await assert_answered_as_before(service, loads, part, 4.0, 0.5, 2.5)
        assert metric(service, "anychip_worker_restarts_total") == 0


@pytest.mark.nightly
@pytest.mark.parametrize("pause_s", [2.0, 8.0, 20.0])
@pytest.mark.parametrize(("models", "delay_ms"), [(2, 20), (3, 20), (2, 80), (1, 80)])
async def test_after_long_pauses_each_model_is_answered_as_before(serve, models, delay_ms, pause_s):
    with serving(serve, models, delay_ms) as service:
        async with hurried(service, dict.fromkeys(MODELS[:models], GREY), 6, 2000) as loads:
            for part in PARTS:
                await assert_answered_as_before(service, loads, part, pause_s, 3.0, 7.0)
        assert metric(service, "anychip_worker_restarts_total") == 0
