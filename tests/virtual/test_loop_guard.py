"""What holds a loop up is found beside programs that hog every processor, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time

import pytest
import uvloop

from tests.support.loop_guard import CallbackGuard, guarded, guarded_loop

LOOPS = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.Loop}


@pytest.fixture(params=[False, True], ids=["alone", "beside hogs"])
def hogs(request):
    """Two for each processor, where there are any."""
    count = 2 * len(os.sched_getaffinity(0)) if request.param else 0
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3 * bool(count))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def computes(seconds):
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def run(kind, main):
    """What was found, and the longest time by the clock that a tick of 10 ms was late."""
    late_s = [0.0]

    async def measured():
        async def tick():
            while True:
                before_s = time.monotonic()
                await asyncio.sleep(0.01)
                late_s[0] = max(late_s[0], time.monotonic() - before_s - 0.01)

        ticking = asyncio.create_task(tick())
        await main()
        ticking.cancel()

    with contextlib.ExitStack() as stack:
        if kind == "asyncio":
            guard, factory = stack.enter_context(guarded()), LOOPS[kind]
        else:
            guard = CallbackGuard()
            stack.callback(guard.close)
            factory = guarded_loop(LOOPS[kind], guard)
        loop = factory()
        try:
            loop.run_until_complete(measured())
        finally:
            loop.close()
    return guard, late_s[0]


@pytest.mark.parametrize("kind", LOOPS)
def test_what_computes_for_long_is_named_and_nothing_else(hogs, kind):
    async def plant():
        await asyncio.sleep(0.02)
        computes(0.05)

    async def main():
        await asyncio.gather(plant(), *(asyncio.sleep(0.001 * number) for number in range(300)))

    guard, late_s = run(kind, main)
    print(f"late by the clock: {late_s:.3f} s, {guard.callbacks} callbacks, {guard.held}")
    [held] = guard.held
    assert "plant" in held.name
    assert 0.05 <= held.computed_s < 0.06


@pytest.mark.parametrize("kind", LOOPS)
def test_what_blocks_is_named_and_nothing_else(hogs, kind):
    def plant():
        time.sleep(0.05)

    async def main():
        asyncio.get_running_loop().call_later(0.02, plant)
        await asyncio.gather(*(asyncio.sleep(0.001 * number) for number in range(300)))

    guard, late_s = run(kind, main)
    print(f"late by the clock: {late_s:.3f} s, {guard.callbacks} callbacks, {guard.held}")
    [held] = guard.held
    assert "plant" in held.name
    assert 0.049 <= held.blocked_s < 0.06
    assert held.computed_s < 0.005


@pytest.mark.parametrize("kind", LOOPS)
def test_of_a_loop_that_others_keep_from_the_processor_nothing_is_said(hogs, kind):
    async def main():
        for _ in range(40):
            computes(0.004)
            await asyncio.sleep(0.005)

    guard, late_s = run(kind, main)
    print(f"late by the clock: {late_s:.3f} s, {guard.callbacks} callbacks")
    assert guard.held == []
