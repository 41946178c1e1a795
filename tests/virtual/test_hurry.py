"""Clients in a hurry: beside others that ask much, and after any stall, what can be answered in time is let in."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tests.support.virtual_service import serving

MODELS = ("resnet18", "resnet50")
QUIET_S = 10.0
DECODE_S, BATCH_S = 0.02, {1: 0.1, 4: 0.3}
SLOW_S = {1: 0.3, 4: 1.0}
PATIENT_S = 120.0


async def again_and_again(service, **asked):
    while True:
        if (await service.ask(**asked)).code != "OK":
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.15 if asked["timeout_s"] == PATIENT_S else 0.0)


async def ended(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("batch_s", "timeout_s"), [(SLOW_S, 8.0), (BATCH_S, 3.0)], ids=["slow", "fast"])
async def test_one_that_asks_little_is_not_refused_for_the_lateness_of_those_who_ask_much(folder, batch_s, timeout_s):
    """Five and four requests at a time from two addresses: the later ones of each are overtaken by whoever comes. Those
    of a third client take half of its deadline at most, and it was refused as if they were as late.
    """
    async with serving(folder, decode_s=DECODE_S, batch_s=batch_s, models=MODELS) as service:
        much = [("10.0.0.1", 5), ("10.0.0.2", 4)]
        tasks = [
            asyncio.create_task(again_and_again(service, model=model, timeout_s=PATIENT_S, client=client))
            for model in MODELS
            for client, at_once in much
            for _ in range(at_once)
        ]
        await asyncio.sleep(30.0)
        asked = [
            asyncio.create_task(again_and_again(service, model=model, timeout_s=timeout_s, client="10.0.0.3"))
            for model in MODELS
            for _ in range(2)
        ]
        began = len(service.outcomes)
        await asyncio.sleep(120.0)
        codes = Counter(outcome.code for outcome in service.outcomes[began:])
        await ended([*tasks, *asked])
    assert set(codes) == {"OK"}, codes


def paused(part, seconds, times=1):
    async def stall(service):
        for _ in range(times):
            await service.pause(part, seconds)
            await asyncio.sleep(seconds)

    return stall


def slower(what, factor, share=1.0):
    """For half a minute, as while other models load: all of the work, or a share of it at random."""

    async def stall(service):
        chance = random.Random(1)

        def times():
            return factor if chance.random() < share else 1.0

        if what == "batches":
            service.processes.batch_s = lambda run: BATCH_S[run.batch_size] * times()
        else:
            service.processes.image_s = lambda job: DECODE_S * times()
        await asyncio.sleep(30.0)
        service.processes.batch_s = lambda run: BATCH_S[run.batch_size]
        service.processes.image_s = lambda job: DECODE_S

    return stall


async def worker_lost(service):
    service.processes.workers[-1].kill()


STALLS = {
    "worker": paused("worker", 3.0),
    "worker, often": paused("worker", 1.0, times=8),
    "decoders": paused("decoders", 3.0),
    "decoders, often": paused("decoders", 1.0, times=8),
    "service": paused("service", 8.0),
    "batches of five times the time": slower("batches", 5),
    "batches of twenty times the time": slower("batches", 20),
    "now and then a batch of ten times the time": slower("batches", 10, 0.3),
    "decoding of twenty times the time": slower("decoding", 20),
    "decoding of a hundred times the time": slower("decoding", 100),
    "worker lost": worker_lost,
}


@pytest.mark.parametrize("stall", STALLS.values(), ids=STALLS)
@pytest.mark.parametrize("quiet", ["silent", "asked"])
async def test_ten_seconds_after_any_stall_whoever_has_twice_the_time_is_let_in(folder, stall, quiet):
    """Beside others that take half of what the device can do, with bursts from one address."""
    chance = random.Random(1)
    async with serving(folder, decode_s=DECODE_S, batch_s=BATCH_S, models=MODELS) as service:
        asked, others = set(), asyncio.Event()
        others.set()

        async def beside():
            while True:
                await asyncio.sleep(round(chance.expovariate(0.5 * 4 / BATCH_S[4] / 2.5), 6))
                await others.wait()
                model, burst = chance.choice(MODELS), chance.random() < 0.5
                client = "10.0.0.1" if burst else f"10.0.0.{chance.randrange(2, 6)}"
                for _ in range(4 if burst else 1):
                    task = asyncio.create_task(service.ask(model, timeout_s=PATIENT_S, client=client))
                    asked.add(task)
                    task.add_done_callback(asked.discard)

        async def hurried(seconds, timeout_s):
            tasks = []
            for number in range(int(2 * seconds)):
                asking = service.ask(MODELS[number % 2], timeout_s=timeout_s, client="10.0.1.1")
                tasks.append(asyncio.create_task(asking))
                await asyncio.sleep(0.5)
            return await asyncio.gather(*tasks)

        beside_them = asyncio.create_task(beside())
        await asyncio.sleep(5.0)
        longest_s = max(outcome.seconds for outcome in await hurried(60.0, PATIENT_S))
        await stall(service)
        others.clear()
        await asyncio.gather(*asked)
        if quiet == "asked":
            others.set()
        await asyncio.sleep(QUIET_S)
        others.set()
        codes = Counter(outcome.code for outcome in await hurried(QUIET_S, 2 * longest_s))
        await ended([beside_them, *asked])
    assert codes == {"OK": 2 * QUIET_S}, codes
