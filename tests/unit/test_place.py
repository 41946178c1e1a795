"""The life of supervised children: every move, limit and pause, in virtual time. No process is started."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import clock
from app.processes.breaker import BACKOFF_S, BROKEN_S, IN_A_ROW, IN_WINDOW, WINDOW_S, Breaker
from app.processes.place import Cause, ChildStartError, ChildStatus, PlaceStatus, SupervisedChild, Supervisor
from tests.support.doubles import Process, turns
from tests.support.load import until

log = logging.getLogger("anychip.test")
ANSWER_S, START_S, END_S, KILL_S = 5.0, 30.0, 2.0, 3.0


class Sleeper(SupervisedChild):
    """A child that says nothing by itself. It cannot start if it `fails`, is not ready by itself if it `loads`, and has
    something to finish while it `works`.
    """

    start_s, end_s, kill_s = START_S, END_S, KILL_S

    def __init__(self, name="sleeper", *, fails=None, loads=False, mortal=True, begins_s=0.0):
        super().__init__(name)
        self.fails, self.loads, self.mortal, self.begins_s = fails, loads, mortal, begins_s
        self.looks = 0
        self.works = False
        self.told = []

    async def begin(self):
        await asyncio.sleep(self.begins_s)
        if self.fails:
            raise self.fails
        self.process = Process(mortal=self.mortal)
        if not self.loads:
            self.move(ChildStatus.PREPARED)

    def disconnect(self):
        pass

    def answer_s(self):
        return ANSWER_S

    def has_work(self):
        return self.works

    def look(self):
        self.looks += 1

    def gone(self):
        self.told.append((self.name, self.cause.value))


@contextlib.asynccontextmanager
async def supervised(make=Sleeper, **options):
    """Keep a place filled; yield its supervisor, and what became of its children."""
    gone, numbers = [], itertools.count(1)

    def made():
        child = make(str(next(numbers)))
        child.told = gone
        return child

    supervisor = Supervisor(made, log, **options)
    try:
        yield supervisor, gone
    finally:
        await supervisor.stop()


async def test_a_child_that_dies_is_replaced_at_once_and_one_that_is_stopped_is_not(virtual_time, caplog):
    async with supervised() as (supervisor, gone):
        first = await supervisor.ready
        first.process.exit(-signal.SIGSEGV)
        first.end("its socket is closed")
        second = await supervisor.ready
        assert second is supervisor.child is not first
        assert first.status is ChildStatus.ENDED
        assert (first.exit_status, first.process.killed) == (-signal.SIGSEGV, 0)
        assert gone == [("1", "died")]
        assert f"(status {-signal.SIGSEGV})" in caplog.text
    assert gone == [("1", "died"), ("2", "stopped")]
    assert (second.exit_status, second.status) == (-signal.SIGKILL, ChildStatus.ENDED)
    assert supervisor.is_closed


async def test_a_child_that_hangs_is_killed_and_one_that_says_anything_is_not(virtual_time):
    async with supervised() as (supervisor, gone):
        first = await supervisor.ready
        for _ in range(20):
            await asyncio.sleep(1.0)
            first.received_s = clock.monotonic()
        assert first.looks > 10
        await asyncio.sleep(ANSWER_S + 2.0)
        assert "it hung: no answer for" in first.over.result()
        assert gone == [("1", "hung")]


async def test_a_child_that_hangs_in_its_start_is_replaced(virtual_time):
    async with supervised(lambda name: Sleeper(name, loads=name == "1", begins_s=100.0)) as (supervisor, gone):
        waiting = supervisor.ready
        await asyncio.sleep(100.0 + START_S - 1.0)  # While it is begun nobody waits for an answer of it.
        assert not waiting.done()
        with pytest.raises(ChildStartError, match="it was not ready within 30 s"):
            await asyncio.wait_for(waiting, ANSWER_S)
        assert (await supervisor.ready).name == "2"
        assert gone == [("1", "start")]


async def test_children_that_cannot_start_are_tried_again_with_pauses_and_reported_once(virtual_time, caplog):
    began_s = []

    def make(name):
        began_s.append(asyncio.get_running_loop().time())
        return Sleeper(name, fails=None if name == "6" else OSError("no memory."))

    async with supervised(make) as (supervisor, gone):
        with pytest.raises(ChildStartError, match="1 did not start: it could not be started: no memory"):
            await supervisor.ready
        await until(lambda: supervisor.child.is_ready, blocks=False)
        pauses = [round(after - before, 1) for before, after in itertools.pairwise(began_s)]
        assert pauses == [*BACKOFF_S, BACKOFF_S[-1]]
        assert gone == [(str(number), "start") for number in range(1, 6)]
    [said] = [each for each in caplog.records if "did not start" in each.message]
    assert (said.levelname, said.message.endswith("no memory; it is tried again")) == ("ERROR", True)


async def test_a_process_that_cannot_be_killed_is_quarantined_and_another_one_starts(virtual_time, caplog):
    async with supervised(lambda name: Sleeper(name, mortal=name != "1")) as (supervisor, gone):
        first = await supervisor.ready
        first.kill("it hung", Cause.HUNG)
        await asyncio.sleep(KILL_S - 0.1)
        assert (first.status, gone) == (ChildStatus.ENDING, [])
        await asyncio.sleep(0.2)
        assert (first.status, gone) == (ChildStatus.QUARANTINED, [("1", "hung")])
        assert "cannot be killed and is left behind" in caplog.text
        assert (await supervisor.ready).name == "2"
        first.process.exit(-signal.SIGKILL)
        await turns()
        assert first.status is ChildStatus.ENDED
        assert gone == [("1", "hung")]


async def test_the_one_that_takes_over_serves_at_once_and_the_old_one_has_time_to_finish(virtual_time):
    async with supervised() as (supervisor, gone):
        old, new = await supervisor.ready, Sleeper("new")
        old.works = True
        await supervisor.prepare(new)
        assert (old.status, new.status, supervisor.child) == (ChildStatus.READY, ChildStatus.PREPARED, old)
        over = supervisor.take_over(new, 60.0)
        assert (old.status, new.status, supervisor.child) == (ChildStatus.RETIRING, ChildStatus.READY, new)
        assert await supervisor.ready is new
        for _ in range(59):
            old.received_s = clock.monotonic()
            await asyncio.sleep(1.0)
        new.kill("it died")
        await turns()
        assert (over.done(), supervisor.status) == (False, PlaceStatus.RESTARTING), "two are there already"
        await over
        assert (old.cause, old.process.killed, old.name in dict(gone)) == (Cause.REPLACED, 1, True)
        assert (await supervisor.ready).name == "2"
        assert supervisor.restarts == 1


@pytest.mark.parametrize("end", ["it cannot start", "it dies before it takes over", "it is not wanted any more"])
async def test_where_the_new_one_does_not_take_over_the_old_one_serves_on(virtual_time, end):
    async with supervised() as (supervisor, _):
        old, new = await supervisor.ready, Sleeper("new", fails=OSError("no") if end == "it cannot start" else None)
        with pytest.raises(ChildStartError) if end != "it is not wanted any more" else contextlib.nullcontext():
            await supervisor.prepare(new)
            if end == "it is not wanted any more":
                await supervisor.discard(new)
            else:
                new.kill("it died")
                supervisor.take_over(new, 60.0)
        await turns()
        assert (supervisor.child, supervisor.status, supervisor.children) == (old, PlaceStatus.READY, [old])
        old.kill("it died")
        assert await supervisor.ready, "another one may start"


async def test_while_a_process_that_cannot_be_killed_is_there_an_exclusive_place_stays_empty(virtual_time, caplog):
    async with supervised(lambda name: Sleeper(name, mortal=name != "1"), exclusive=True) as (supervisor, _):
        first = await supervisor.ready
        first.kill("it hung", Cause.HUNG)
        await asyncio.sleep(600)
        assert (supervisor.status, supervisor.child) == (PlaceStatus.QUARANTINED, first)
        assert "cannot be killed" in supervisor.reason
        first.process.exit(-signal.SIGKILL)
        await supervisor.ready
        assert (supervisor.status, supervisor.reason) == (PlaceStatus.READY, "")


async def test_a_stop_gives_time_to_end(virtual_time):
    async with supervised() as (supervisor, gone):
        first, loop = await supervisor.ready, asyncio.get_running_loop()
        supervisor.close()
        loop.call_later(2.0, first.process.exit, 0)
        loop.call_later(2.0, first.end, "it ended")
        await supervisor.stop(7.0)
        assert (first.exit_status, first.process.killed) == (0, 0)
        assert gone == [("1", "stopped")]


async def test_nobody_is_blamed_for_time_in_which_this_process_stood_still(virtual_time):
    async with supervised() as (supervisor, gone):
        first = await supervisor.ready
        for _ in range(2):
            asyncio.get_running_loop().stand_still(3600.0)
            await turns()
            first.check()
        assert not first.over.done()
        first.received_s = clock.monotonic()
        assert gone == []


def pauses(deaths, between_s=1.0, **each):
    """Return the pauses after so many deaths, each so long after the end of the pause before, and the breaker."""
    breaker, now_s, found = Breaker(), 1000.0, []
    for _ in range(deaths):
        found.append(breaker.died(now_s, **each))
        now_s += found[-1] + between_s
    return found, breaker


def test_workers_that_answer_nothing_are_started_after_growing_pauses_and_then_once_a_minute():
    found, breaker = pauses(7)
    assert found == [0.0, 0.5, 2.0, 5.0, BROKEN_S, BROKEN_S, BROKEN_S]
    assert breaker.reason == "7 workers died in a row"


def test_a_broken_replica_is_tried_once_a_minute_until_a_worker_has_served_for_one():
    _, breaker = pauses(IN_WINDOW, answered=True)
    now_s = 1000.0 + 10 * WINDOW_S
    assert breaker.died(now_s, answered=True, served_s=WINDOW_S - 1) == BROKEN_S
    now_s += 10 * WINDOW_S
    assert breaker.died(now_s, answered=True, served_s=WINDOW_S) == 0.0
    assert not breaker.reason


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 30.0)), min_size=1, max_size=200))
def test_however_workers_die_a_window_has_no_more_starts_than_it_may(lives):
    """`lives`: whether each worker answered, and how long it served."""
    breaker, now_s, started = Breaker(), 0.0, []
    for answered, served_s in lives:
        started.append(now_s)
        now_s += served_s
        now_s += breaker.died(now_s, answered=answered, served_s=served_s)
    for index, first_s in enumerate(started):
        assert sum(each_s - first_s <= WINDOW_S for each_s in started[index:]) <= IN_WINDOW + 1
    silent = [answered for answered, _ in lives[-IN_A_ROW:]]
    assert breaker.reason or any(silent) or len(lives) < IN_A_ROW
