"""A place on a device whose workers die: how often that counts, as what, and when the next one is started."""

from __future__ import annotations

import asyncio
import os

import pytest

from app.fleet import process
from app.fleet.device_metrics import RESTARTS
from app.fleet.process import Replica
from app.fleet.spawn import spawn_with
from app.processes.breaker import BROKEN_S, IN_A_ROW
from app.processes.place import Cause, ChildStartError, ChildStatus, PlaceStatus
from tests.support.doubles import MODEL, StartedWorkers, counting, events, fleet_of, plan_of, turns
from tests.support.load import until


class Place:
    """A replica of a fleet, its workers, and what it has told."""

    def __init__(self, made):
        self.made, self.told, self.fleet = made, [], fleet_of()
        self.moved = counting(self.fleet._metrics)
        owner = events(
            ready=lambda worker: self.told.append(("ready", worker.name)),
            retiring=lambda worker: self.told.append(("retiring", worker.name)),
            gone=lambda worker, reason: self.told.append(("gone", worker.name)),
            died=self.fleet._worker_died,
            broken=lambda: self.told.append(("broken", "null:0")),
        )
        self.replica = Replica("null:0", plan_of(MODEL), None, owner)

    async def begun(self):
        """Wait for the next worker and make it ready; return it, and after how many seconds it was started."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await until(lambda: self.made and self.made[-1].status is ChildStatus.STARTING)
        worker = self.made[-1]
        worker.succeed()
        await turns()
        assert self.replica.child is worker
        assert worker.is_ready
        return worker, round(loop.time() - began_s, 2)


@pytest.fixture
async def place(virtual_time, monkeypatch):
    made = StartedWorkers()
    monkeypatch.setattr(process, "WorkerProcess", made)
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
        worker.has_served = True
        worker.kill("it is so", Cause(kind))
    await turns()
    expected = {f"worker_restarts null:0 {kind}": 1}
    assert place.moved() == ({**expected, "worker_restarts null:0 died": 1} if kind == "start" else expected)
    assert place.replica.restarts == sum(place.moved().values())
    assert place.told == [("ready", worker.name), ("gone", worker.name)]
    assert place.replica.status is PlaceStatus.RESTARTING
    _, after_s = await place.begun()
    assert (place.replica.status, place.replica.reason) == (PlaceStatus.READY, "")
    assert after_s < 3


async def test_a_worker_that_ends_to_give_memory_back_is_followed_at_once_however_often(place):
    for number in range(30):
        worker, after_s = await place.begun()
        assert after_s < 0.01
        worker.has_served = True
        worker.kill("it leaks", Cause.LEAKED)
        await turns()
        assert place.moved() == {"worker_restarts null:0 leaked": number + 1}
    assert not [each for each in place.told if each[0] == "broken"]


async def test_a_worker_that_leaks_before_it_has_answered_anything_breaks_the_replica_as_any_other(place):
    pauses = []
    for _ in range(IN_A_ROW + 1):
        worker, after_s = await place.begun()
        pauses.append(after_s)
        worker.kill("it leaks", Cause.LEAKED)
        await turns()
    assert pauses[-1] >= BROKEN_S > pauses[-2]
    assert place.replica.status is PlaceStatus.BROKEN
    assert [each[0] for each in place.told].count("broken") == 2


async def test_the_first_worker_that_cannot_start_is_an_error_of_the_service_and_no_restart(place):
    await turns()
    place.made[0].fail()
    with pytest.raises(ChildStartError, match=r"^it could not start$"):
        await place.replica.wait_ready()
    await turns()
    assert place.moved() == {}
    assert (place.replica.status, len(place.made)) == (PlaceStatus.STOPPED, 1)


async def test_a_start_that_is_cancelled_while_it_packs_leaves_no_memory():
    before = os.listdir("/proc/self/fd")
    starting = asyncio.ensure_future(spawn_with([bytes(1 << 24)], "a-load", "a worker", forks=False))
    await turns(2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.get_running_loop().shutdown_default_executor()  # It writes on, whoever waits for it.
    assert os.listdir("/proc/self/fd") == before
