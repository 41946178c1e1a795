"""The life of supervised children: every move, limit and pause, in virtual time. No process is started."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal

import pytest

from app.processes import place
from app.processes.breaker import BACKOFF_S
from app.processes.place import (
    AttendedClock,
    Cause,
    ChildStartError,
    ChildStatus,
    PlaceStatus,
    SupervisedChild,
    Supervisor,
)
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
        self.disconnected = self.looks = 0
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
        self.disconnected += 1

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


async def test_an_end_that_nobody_has_said_is_found_when_it_is_looked_at(virtual_time):
    """Another process may hold its socket open. What it said last is read first."""
    async with supervised() as (supervisor, gone):
        first = await supervisor.ready
        first.process.exit(1)
        await asyncio.sleep(0.5)
        first.hear()
        await asyncio.sleep(1.0)
        assert not first.over.done()
        await asyncio.sleep(1.0)
        assert first.over.result() == "it ended"
        assert (await supervisor.ready).name == "2"
        assert gone == [("1", "died")]


async def test_a_disconnected_process_is_given_time_to_end_and_then_killed(virtual_time):
    async with supervised() as (supervisor, gone):
        first = await supervisor.ready
        first.end("its socket is closed")
        await asyncio.sleep(END_S - 0.1)
        assert (first.process.killed, gone) == (0, [])
        await asyncio.sleep(0.2)
        assert (first.process.killed, gone) == (1, [("1", "died")])


async def test_a_child_that_hangs_is_killed_and_one_that_says_anything_is_not(virtual_time):
    async with supervised() as (supervisor, gone):
        first = await supervisor.ready
        for _ in range(20):
            await asyncio.sleep(1.0)
            first.hear()
        assert first.looks > 10
        await asyncio.sleep(ANSWER_S + 2.0)
        assert "it hung: no answer for" in first.over.result()
        assert gone == [("1", "hung")]


async def test_one_that_was_stopped_from_outside_has_not_hung(virtual_time, monkeypatch):
    monkeypatch.setattr(place, "is_stopped", lambda pid: True)
    for loads in (False, True):
        async with supervised(lambda name, loads=loads: Sleeper(name, loads=loads)) as (_, gone):
            await asyncio.sleep(ANSWER_S + 2.0)
            assert gone == [("1", "start" if loads else "frozen")]


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
        return Sleeper(name, fails=None if name == "6" else OSError("no memory"))

    async with supervised(make) as (supervisor, gone):
        with pytest.raises(ChildStartError, match="1 did not start: it could not be started: no memory"):
            await supervisor.ready
        await until(lambda: supervisor.child.is_ready)
        pauses = [round(after - before, 1) for before, after in itertools.pairwise(began_s)]
        assert pauses == [*BACKOFF_S, BACKOFF_S[-1]]
        assert gone == [(str(number), "start") for number in range(1, 6)]
    assert [each.levelname for each in caplog.records if "did not start" in each.message] == ["ERROR"]


async def test_an_error_of_ours_in_a_start_leaves_no_place_empty(virtual_time, caplog):
    async with supervised(lambda name: Sleeper(name, fails=KeyError("oops") if name == "1" else None)) as (
        supervisor,
        _,
    ):
        await until(lambda: supervisor.child.is_ready)
        assert "KeyError" in caplog.text


async def test_one_that_has_served_is_followed_at_once_and_one_that_was_replaced_is_no_failure(virtual_time):
    async with supervised() as (supervisor, gone):
        for cause in (Cause.DIED, Cause.HUNG, Cause.REPLACED, Cause.DIED):
            child = await supervisor.ready
            child.has_served = True
            child.kill("the test ends it", cause)
            await turns()
        assert supervisor.breaker.in_a_row == 1
        assert (await supervisor.ready).name == "5"
        assert [each for _, each in gone] == ["died", "hung", "replaced", "died"]


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
            old.hear()
            await asyncio.sleep(1.0)
        new.kill("it died")
        await turns()
        assert (over.done(), supervisor.status) == (False, PlaceStatus.RESTARTING), "two are there already"
        await over
        assert (old.cause, old.process.killed, old.name in dict(gone)) == (Cause.REPLACED, 1, True)
        assert (await supervisor.ready).name == "2"
        assert supervisor.restarts == 1


async def test_an_old_one_without_work_ends_at_once_and_has_not_failed(virtual_time):
    async with supervised() as (supervisor, _):
        old, new = await supervisor.ready, Sleeper("new")
        await supervisor.prepare(new)
        await supervisor.take_over(new, 60.0)
        assert (old.cause, new.is_ready, supervisor.restarts) == (Cause.REPLACED, True, 0)
        assert supervisor.breaker.in_a_row == 0


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


async def test_a_place_is_filled_again_where_what_a_child_had_cannot_be_given_back(virtual_time, caplog):
    class Keeper(Sleeper):
        def gone(self):
            raise RuntimeError("a fault of ours")

    async with supervised(Keeper) as (supervisor, _):
        (await supervisor.ready).kill("it hung", Cause.HUNG)
        await asyncio.sleep(0)
        assert (await supervisor.ready).name == "2"
    assert "could not be given back" in caplog.text


@pytest.mark.parametrize("begins_s", [0.0, 1000.0])
async def test_a_stop_waits_for_no_start_and_no_pause(virtual_time, begins_s):
    async with supervised(lambda name: Sleeper(name, fails=OSError("no"), begins_s=begins_s)) as (supervisor, _):
        await asyncio.sleep(3.0)
        await asyncio.wait_for(supervisor.stop(), 0.01)  # Of virtual time.
        assert supervisor.child.status is ChildStatus.ENDED
        with pytest.raises(ChildStartError):
            await supervisor.ready


async def test_a_stop_gives_time_to_end(virtual_time):
    async with supervised() as (supervisor, gone):
        first, loop = await supervisor.ready, asyncio.get_running_loop()
        supervisor.close()
        loop.call_later(2.0, first.process.exit, 0)
        loop.call_later(2.0, first.end, "it ended")
        await supervisor.stop(7.0)
        assert (first.exit_status, first.process.killed) == (0, 0)
        assert gone == [("1", "stopped")]


async def test_one_that_connects_in_the_moment_of_its_end_is_disconnected(virtual_time):
    class Late(Sleeper):
        async def begin(self):
            self.end("it ended", Cause.DIED)
            self.process, self.disconnected = Process(), 0
            self.move(ChildStatus.READY)

    async with supervised(lambda name: (Late if name == "1" else Sleeper)(name)) as (supervisor, _):
        first = supervisor.child
        await until(lambda: supervisor.child.is_ready)
        assert (first.disconnected, first.process.killed, first.status) == (1, 1, ChildStatus.ENDED)


def test_time_in_which_nobody_looked_counts_as_two_looks(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(place.clock, "monotonic", lambda: now[0])
    clock = AttendedClock(0.25)
    for _ in range(8):
        now[0] += 0.25
        clock.look()
    assert clock.now_s() == pytest.approx(2.0)
    now[0] += 3600
    assert clock.now_s() == pytest.approx(2.5)
    assert clock.look() == pytest.approx(2.5)
    now[0] += 0.25
    assert clock.now_s() == pytest.approx(2.75)


async def test_nobody_is_blamed_for_time_in_which_this_process_stood_still(virtual_time):
    async with supervised() as (supervisor, gone):
        first = await supervisor.ready
        for _ in range(2):
            asyncio.get_running_loop().stand_still(3600.0)
            await turns()
            first.check()
        assert not first.over.done()
        first.hear()
        assert gone == []
