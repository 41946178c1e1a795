"""A place on a device whose workers die: how often that counts, as what, and when the next one is started."""

from __future__ import annotations

import asyncio

import pytest

from app.fleet import replica as replica_module
from app.fleet.device_metrics import RESTARTS
from app.fleet.process import WorkerStartError
from app.fleet.replica import Events, Replica
from app.processes.breaker import BROKEN_S, IN_A_ROW
from tests.support.doubles import StartedWorkers, counting, fleet_of, turns
from tests.support.load import until


class Place:
    """A replica of a fleet, its workers, and what it has told."""

    def __init__(self, made):
        self.made, self.told, self.fleet = made, [], fleet_of()
        self.moved = counting(self.fleet._metrics)
        events = Events(
            ready=lambda worker: self.told.append(("ready", worker.id)),
            computed=lambda *_: None,
            message=lambda *_: None,
            retiring=lambda worker: self.told.append(("retiring", worker.id)),
            gone=lambda worker, reason: self.told.append(("gone", worker.id)),
            died=self.fleet._worker_died,
            broken=lambda replica, reason: self.told.append(("broken", reason)),
        )
        self.replica = Replica("null:0", None, None, events)

    async def begun(self):
        """Wait for the next worker and make it ready; return it, and after how many seconds it was started."""
        loop, count = asyncio.get_running_loop(), len([each for each in self.made if each.ready is not None])
        began_s = loop.time()
        await until(lambda: len(self.made) > count)
        worker = self.made[-1]
        worker.answered = False
        worker.succeed()
        await turns()
        assert self.replica.current is worker
        return worker, round(loop.time() - began_s, 2)


@pytest.fixture
async def place(virtual_time, monkeypatch):
    made = StartedWorkers()
    monkeypatch.setattr(replica_module, "WorkerProcess", made)
    found = Place(made)
    yield found
    await found.replica.stop()
    found.fleet.arena.close()


@pytest.mark.parametrize("kind", RESTARTS)
async def test_a_death_is_counted_once_by_its_kind_and_the_worker_is_gone_once(place, kind):
    worker, _ = await place.begun()
    if kind == "start":
        worker.kill("it died")
        await turns()
        place.made[-1].fail()
    else:
        worker.answered = True
        worker.kill("it is so", end=kind)
    await turns()
    expected = {f"worker_restarts null:0 {kind}": 1}
    assert place.moved() == ({**expected, "worker_restarts null:0 died": 1} if kind == "start" else expected)
    assert place.replica.restarts == sum(place.moved().values())
    assert place.told == [("ready", worker.id), ("gone", worker.id)]
    assert place.replica.state in ("restarting", "starting")
    _, after_s = await place.begun()
    assert (place.replica.state, place.replica.reason) == ("ready", "")
    assert after_s < 3


async def test_a_worker_that_ends_to_give_memory_back_is_followed_at_once_however_often(place):
    for number in range(30):
        worker, after_s = await place.begun()
        assert after_s < 0.01
        worker.answered = True
        worker.kill("it leaks", end="leaked")
        await turns()
        assert place.moved() == {"worker_restarts null:0 leaked": number + 1}
    assert not [each for each in place.told if each[0] == "broken"]


async def test_a_worker_that_leaks_before_it_has_answered_anything_breaks_the_replica_as_any_other(place):
    pauses = []
    for _ in range(IN_A_ROW + 1):
        worker, after_s = await place.begun()
        pauses.append(after_s)
        worker.kill("it leaks", end="leaked")
        await turns()
    assert pauses[-1] >= BROKEN_S > pauses[-2]
    assert place.replica.state == "broken"
    assert [each[0] for each in place.told].count("broken") == 2


async def test_the_first_worker_that_cannot_start_is_an_error_of_the_service_and_no_restart(place):
    await turns()
    place.made[0].fail()
    with pytest.raises(WorkerStartError):
        await place.replica.wait_ready()
    assert place.moved() == {}
    assert place.replica.state == "broken"


async def test_while_a_process_that_cannot_be_killed_holds_the_device_nothing_is_started(place):
    worker, _ = await place.begun()
    worker.abandoned = worker.answered = True
    worker.kill("it hangs", end="hung")
    await asyncio.sleep(600)
    assert (place.replica.state, len(place.made)) == ("quarantined", 1)
    assert place.moved() == {"worker_restarts null:0 hung": 1}
    worker.exited.set_result(None)
    await place.begun()
    assert place.replica.state == "ready"


async def test_whom_a_hand_over_replaces_has_not_died(place):
    old, _ = await place.begun()
    preparing = asyncio.ensure_future(place.replica.prepare(None))
    await turns()
    new = place.made[-1]
    new.succeed()
    drained = place.replica.take_over(await preparing, None, 60.0)
    old.drained.set()
    await drained
    assert place.told == [("ready", old.id), ("ready", new.id), ("retiring", old.id), ("gone", old.id)]
    assert (place.moved(), place.replica.restarts) == ({}, 0)
