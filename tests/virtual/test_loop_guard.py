"""What holds a loop up is found beside programs that hog every processor, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import uvloop

from tests.support import loop_guard
from tests.support.loop_guard import (
    BLOCKED_IS_SEEN,
    BLOCKED_S,
    COMPUTED_TURNS,
    CallbackGuard,
    Witness,
    guarded,
    guarded_loop,
    looked_at,
)

PLANTED_TURNS = 10 * COMPUTED_TURNS
"""Far above the limit: while a turn is measured another thread of the core, or the hypervisor, may make it slow."""
LOOPS = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.Loop}
sees_blocked = pytest.mark.skipif(not BLOCKED_IS_SEEN, reason="this kernel has no schedstat")


# Services have uvloop's.
EACH = [
    ("asyncio", False),
    ("uvloop", False),
    ("uvloop", True),
    pytest.param("asyncio", True, marks=pytest.mark.nightly),
]


@pytest.fixture
def hogs(request):
    """Two for each processor, where there are any."""
    count = 2 * len(os.sched_getaffinity(0)) if request.param else 0
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def computes(turns):
    for _ in range(int(turns)):
        pass


def run(kind, main):
    """Run `main` on a guarded loop of this kind; return the findings."""

    async def measured():
        await asyncio.wait_for(main(), 600)

    with contextlib.ExitStack() as stack:
        if kind == "asyncio":
            found, factory = stack.enter_context(looked_at()), LOOPS[kind]
        else:
            found = []
            guard = CallbackGuard(found.append)
            stack.callback(guard.close)
            gc.collect()  # As `looked_at` and the service do: no walk over all of PyTorch in a callback.
            gc.freeze()
            stack.callback(gc.unfreeze)
            factory = guarded_loop(LOOPS[kind], guard)
        witness = stack.enter_context(Witness())
        loop = factory()
        try:
            loop.run_until_complete(measured())
        finally:
            loop.close()
    return witness.confirmed(found)


@pytest.mark.parametrize(("kind", "hogs"), EACH, indirect=["hogs"])
@pytest.mark.parametrize("blocks", [False, pytest.param(True, marks=sees_blocked)], ids=["computes", "blocks"])
def test_what_holds_a_loop_up_is_named_and_nothing_else(hogs, kind, blocks):
    def plant():
        if blocks:
            time.sleep(5 * BLOCKED_S)
        else:
            computes(PLANTED_TURNS)

    async def main():
        asyncio.get_running_loop().call_later(0.02, plant)
        await asyncio.gather(*(asyncio.sleep(0.001 * number) for number in range(300)))

    found = run(kind, main)
    assert len(found) == 1, found
    [held] = found
    assert "plant" in held.name
    assert (held.turns > COMPUTED_TURNS, held.blocked_s > BLOCKED_S) == (not blocks, blocks)


@pytest.mark.parametrize(("kind", "hogs"), EACH, indirect=["hogs"])
def test_of_a_loop_that_others_keep_from_the_processor_nothing_is_said(hogs, kind):
    async def main():
        for _ in range(40):
            computes(COMPUTED_TURNS / 20)
            await asyncio.sleep(0.005)

    assert run(kind, main) == []


def test_a_stop_that_is_heard_of_late_is_no_wait(monkeypatch):
    found = []
    guard = CallbackGuard(found.append)
    late = {**vars(time), "sleep": lambda _: guard._continued(0, None)}
    monkeypatch.setattr(loop_guard, "time", SimpleNamespace(**late))
    with contextlib.closing(guard):
        guard.run(time.sleep, time.sleep, 5 * BLOCKED_S)
    assert found == []


def test_the_fixture_of_other_tests_fails_with_the_name():
    async def plant():
        computes(PLANTED_TURNS)

    with pytest.raises(AssertionError, match="plant"), guarded():
        asyncio.run(plant())
