"""Pauses under load with short deadlines: afterwards each model is answered as before, whichever part stood still."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.support.virtual_service import serving

MODELS = ("resnet18", "resnet50")
DECODE_S = 0.001
RETRY_S = 0.05


class Clients:
    """So many of each model, who ask again as soon as they hear something. `codes`: by model."""

    def __init__(self, service, models, clients, timeout_s):
        self.service, self.timeout_s = service, timeout_s
        self.codes = {model: Counter() for model in models}
        self.tasks = [asyncio.create_task(self._ask(model)) for model in models for _ in range(clients)]

    async def _ask(self, model):
        while True:
            outcome = await self.service.ask(model, timeout_s=self.timeout_s)
            self.codes[model][outcome.code] += 1
            if outcome.code != "OK":
                await asyncio.sleep(RETRY_S)

    async def answered(self, seconds):
        before = {model: codes.copy() for model, codes in self.codes.items()}
        await asyncio.sleep(seconds)
        return {model: codes - before[model] for model, codes in self.codes.items()}

    async def end(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_after_each_pause_two_models_are_answered_as_before(folder):
    """Pauses of four seconds, deadlines of one. A model against which they were held had nothing for as long: where the
    others' clients are enough to fill every batch (with four of each it is not seen).
    """
    answers = {model: {"OK": 100} for model in MODELS}  # Half of what batches of two in 25 ms come to in 2.5 s.
    async with serving(folder, decode_s=DECODE_S, batch_s={1: 0.025, 2: 0.025}, models=MODELS) as service:
        load = Clients(service, MODELS, 12, 1.0)
        await asyncio.sleep(2.0)
        for part in ("worker", "decoders", "service"):
            assert await load.answered(2.5) == answers, part
            await service.pause(part, 4.0)
            await asyncio.sleep(0.5)
            assert await load.answered(2.5) == answers, part
        await load.end()
        for kind in ("worker", "decoder"):
            assert service.counted(f"anychip_{kind}_restarts_total") == 0


async def test_a_worker_that_falls_silent_is_replaced_and_what_it_had_is_answered_by_the_next(folder):
    """Ten seconds of silence are too many; the watch looks every quarter of a second."""
    async with serving(folder, decode_s=DECODE_S, batch_s={1: 0.02, 2: 0.02}) as service:
        asked = [asyncio.create_task(service.ask()) for _ in range(4)]
        await asyncio.sleep(0.025)
        await service.pause("worker", 60.0)
        outcomes = await asyncio.gather(*asked)
        assert {outcome.code for outcome in outcomes} == {"OK"}
        assert 10.0 < max(outcome.seconds for outcome in outcomes) < 10.6
        assert service.counted("anychip_worker_restarts_total", reason="hung") == 1
        assert len(service.processes.workers) == 2
