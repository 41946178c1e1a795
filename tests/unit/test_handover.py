"""Hand-overs, and places whose workers die, with workers that are objects here: no process is started."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from app.config import Settings
from app.errors import ServiceError
from app.fleet import process
from app.fleet.device_metrics import RESTARTS
from app.fleet.handover import Handovers
from app.fleet.process import Replica, pack
from app.observability.metrics import Metrics
from app.processes.channel import ChannelError
from app.processes.place import Cause, ChildStartError, ChildStatus, PlaceStatus
from tests.support.doubles import MODEL, StartedWorkers, Worker, counting, fleet_of, loaded_as, owner, plan_of, turns
from tests.support.load import until


@pytest.fixture
def made(monkeypatch):
    made = StartedWorkers()
    monkeypatch.setattr(process, "WorkerProcess", made)
    return made


def broken(replica):
    replica.breaker.reason = "10 workers died within 60 s"
    replica.child.kill("it died")


class Serving:
    """Two replicas that serve "old", and the hand-overs between their workers."""

    def __init__(self, made):
        self.made = made
        self.replicas = [Replica(f"null:{index}", plan_of("old"), None, owner()) for index in range(2)]
        metrics = Metrics()
        self.handovers = Handovers(self.replicas, Settings(drain_s=60.0), metrics)
        self.moved = counting(metrics)

    @property
    def served(self):
        return [each.child.is_ready and each.child.plan.models[0] for each in self.replicas]

    async def __aenter__(self):
        await turns()
        for worker in list(self.made):
            worker.succeed()
        await turns()
        assert self.served == ["old", "old"]
        return self

    async def __aexit__(self, *_):
        await self.handovers.stop()
        await asyncio.gather(*(each.stop() for each in self.replicas))
        left = [worker.name for worker in self.made if worker.process and worker.status is not ChildStatus.ENDED]
        assert not left, "a worker is left behind"


@pytest.mark.parametrize("caller_leaves", [False, True])
async def test_all_replicas_take_over_in_the_same_moment_though_their_caller_leaves(made, caller_leaves):
    async with Serving(made) as serving:
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns()
        if caller_leaves:
            task.cancel()
        _, _, first, second = made
        first.succeed()
        await turns()
        assert serving.served == ["old", "old"]
        second.succeed()
        await turns()
        assert serving.served == ["new", "new"]
        assert task.done() == caller_leaves, "it is over when the old ones are gone"
        for old in made[:2]:
            old.drain()
        await asyncio.gather(task, return_exceptions=True)
        await turns()
        assert task.cancelled() == caller_leaves
        assert [worker.over.done() for worker in made] == [True, True, False, False]
        assert serving.moved() == {"handovers null:0 load": 1, "handovers null:1 load": 1}


@pytest.mark.parametrize("when", ["while the other starts", "after the other is ready", "after the other has died"])
async def test_where_one_worker_cannot_start_or_dies_none_takes_over(made, when):
    async with Serving(made) as serving:
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns()
        _, _, first, second = made
        if when != "while the other starts":
            first.succeed()
            await turns()
        if when == "after the other has died":
            first.kill("it died")
            second.succeed()
        else:
            second.fail()
        with pytest.raises(ChildStartError):
            await task
        assert first.over.done()
        assert second.over.done()
        assert serving.moved() == {}
        assert serving.served == ["old", "old"]
        assert [each.plan.models for each in serving.replicas] == [("old",), ("old",)]
        assert not any(worker.over.done() for worker in made[:2])


async def test_each_replica_takes_its_own_models_and_a_broken_one_stops_no_others(made):
    async with Serving(made) as serving:
        ours, theirs = serving.replicas
        for each in (ours, theirs):
            each.plan = replace(each.plan, plans=2 * each.plan.plans)
        ours.plan = replace(ours.plan, serves=(0,)).with_models(("old", "evil"))
        theirs.plan = replace(theirs.plan, serves=(1,)).with_models(("old", "evil"))
        broken(theirs)
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new", "evil"), "load")))
        await turns()
        assert [worker.plan.models for worker in made[2:]] == [("new", None)]
        made[2].succeed()
        await turns()
        assert ours.child is made[2]
        made[0].drain()
        await task
        # What is to mend it is tried before anything changes.
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new", "good"), "load")))
        await turns()
        assert [worker.plan.models for worker in made[3:]] == [("new", None), (None, "good")]
        made[4].fail()
        with pytest.raises(ChildStartError):
            await task
        assert ours.child is made[2]


async def test_once_stopped_no_hand_over_and_no_compilation_begins(made):
    async with Serving(made) as serving:
        replica = serving.replicas[0]
        replica.child.loaded[0].staged = True
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns()
        stopping = asyncio.create_task(serving.handovers.stop())
        with pytest.raises(ServiceError) as refused:
            await task
        assert refused.value.code == "DRAINING"
        await stopping
        await turns()
        assert not serving.handovers._tasks, "what serves meanwhile would be compiled"
        serving.handovers.relieve(replica.child, "soft")
        assert not serving.handovers._relieved
        with pytest.raises(ServiceError):
            await serving.handovers.run(serving.handovers.to(("new",), "load"))


class Place:
    """A replica of a fleet, its workers, and what it has told."""

    def __init__(self, made):
        self.made, self.told, self.fleet = made, [], fleet_of()
        self.moved = counting(self.fleet._metrics)
        self.fleet.residents.give_up = lambda reason: self.told.append(("broken", "null:0"))
        told = owner(
            worker_ready=lambda worker: self.told.append(("ready", worker.name)),
            worker_retires=lambda worker: self.told.append(("retiring", worker.name)),
            worker_gone=lambda worker, reason: self.told.append(("gone", worker.name)),
            worker_lost=self.fleet.worker_lost,
        )
        self.replica = Replica("null:0", plan_of(MODEL), None, told)

    async def begun(self):
        """Wait for the next worker and make it ready; return it, and after how many seconds it was started."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await until(lambda: self.made and self.made[-1].status is ChildStatus.STARTING, blocks=False)
        worker = self.made[-1]
        worker.succeed()
        await turns()
        assert self.replica.child is worker
        assert worker.is_ready
        return worker, round(loop.time() - began_s, 2)


@pytest.fixture
async def place(virtual_time, made):
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
    starting = asyncio.ensure_future(pack([bytes(1 << 24)], "a-load"))
    await turns(2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.get_running_loop().shutdown_default_executor()  # It writes on, whoever waits for it.
    assert os.listdir("/proc/self/fd") == before


async def test_a_worker_is_believed_that_it_has_loaded_its_own_models_on_its_own_device_alone():
    worker = Worker(models=(MODEL, None), starts=True)
    for index in (-1, 1, 2):
        with pytest.raises(ChannelError, match="none of its own"):
            worker._received(loaded_as("null", {1: 0.1}, model=index))
    report = loaded_as("null", {1: 0.1})
    report.device = "another:0"
    worker._received(report)
    assert {index: on.device for index, on in worker.loaded.items()} == {0: "null:0"}
