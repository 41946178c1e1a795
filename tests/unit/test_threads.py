"""Threads for what would hold up the event loop: nothing runs once its caller has gone on."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.ingress.threads import Threads


@pytest.fixture
async def pool():
    pool = Threads(2)
    yield pool
    await pool.close()


def test_where_there_may_be_no_more_threads_none_is_left_that_waits(monkeypatch):
    """The process would not end: it waited for those that had begun, and they for the others."""
    begin, begun_here = threading.Thread.start, []

    def start(thread):
        if len(begun_here) == 2:
            raise RuntimeError("can't start new thread")
        begin(thread)
        begun_here.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="ulimit -u"):
        Threads(4)
    for each in begun_here:
        each.join(10)
    assert [each.is_alive() for each in begun_here] == [False, False]


FATES = ["kept", "cancelled", "cancelled late", "cancelled twice"]
jobs = st.lists(st.sampled_from(FATES), max_size=40)


@settings(max_examples=50, deadline=None)
@given(jobs, st.booleans())
def test_nothing_runs_once_run_has_ended(plan, closes):
    async def scenario():
        pool, gate = Threads(2), threading.Event()
        busy = threading.Semaphore(3 if closes else 2)  # The loop takes what a closed pool does not.
        started, lent = set(), set()

        def work(index):
            assert busy.acquire(blocking=False)
            assert index in lent
            started.add(index)
            gate.wait()
            assert index in lent
            busy.release()
            return index

        async def lend(index):
            lent.add(index)
            try:
                return await pool.run(work, index)
            finally:
                lent.discard(index)

        tasks = [asyncio.ensure_future(lend(index)) for index in range(len(plan))]
        await asyncio.sleep(0)
        for times in ("cancelled", "cancelled twice"):
            for task, fate in zip(tasks, plan, strict=True):
                if fate in {times, "cancelled twice"}:
                    task.cancel()
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(pool.close()) if closes else None
        gate.set()
        for task, fate in zip(tasks, plan, strict=True):
            if fate == "cancelled late":
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await (closing or pool.close())
        return results, started

    results, started = asyncio.run(scenario())
    for index, (result, fate) in enumerate(zip(results, plan, strict=True)):
        assert result == index or (fate != "kept" and isinstance(result, asyncio.CancelledError))
        assert result != index or index in started


async def test_work_that_waits_while_the_pool_closes_or_comes_later_is_done_here(pool):
    release, both = threading.Event(), threading.Barrier(3)
    busy = [asyncio.ensure_future(pool.run(lambda: both.wait() >= 0 and release.wait())) for _ in range(2)]
    waiting = asyncio.ensure_future(pool.run(threading.current_thread))
    await asyncio.to_thread(both.wait)
    closing = asyncio.ensure_future(pool.close())
    assert await waiting is await pool.run(threading.current_thread) is threading.current_thread()
    release.set()
    await closing
    assert await asyncio.gather(*busy) == [True, True]
