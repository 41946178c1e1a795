"""Hand-overs with workers that are objects here: no process is started."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec.structs import replace as replace_struct

from app.config import Settings
from app.errors import ServiceError
from app.fleet import process
from app.fleet.handover import Handovers
from app.fleet.process import Replica
from app.observability.metrics import Metrics
from app.processes.place import ChildStartError, ChildStatus, PlaceStatus
from app.worker.messages import ModelPlan
from tests.support.doubles import StartedWorkers, counting, events, plan_of, turns


@pytest.fixture
def made(monkeypatch):
    made = StartedWorkers()
    monkeypatch.setattr(process, "WorkerProcess", made)
    return made


def broken(replica):
    """Let the replica's worker die as the last of many."""
    replica.breaker.reason = "10 workers died within 60 s"
    replica.child.kill("it died")


class Serving:
    """Two replicas that serve "old", and the hand-overs between their workers."""

    def __init__(self, made):
        self.made = made
        self.replicas = [Replica(f"null:{index}", plan_of("old"), None, events()) for index in range(2)]
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


async def test_all_replicas_take_over_in_the_same_moment(made):
    async with Serving(made) as serving:
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns()
        _, _, first, second = made
        first.succeed()
        await turns()
        assert serving.served == ["old", "old"]
        second.succeed()
        await turns()
        assert serving.served == ["new", "new"]
        assert not task.done(), "it is over when the old ones are gone"
        for old in made[:2]:
            old.drain()
        await task
        assert [worker.over.done() for worker in made] == [True, True, False, False]
        assert serving.moved() == {"handovers null:0 load": 1, "handovers null:1 load": 1}


@pytest.mark.parametrize("when", ["while the other starts", "after the other is ready"])
async def test_where_one_worker_cannot_start_none_takes_over(made, when):
    async with Serving(made) as serving:
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns()
        _, _, first, second = made
        if when == "after the other is ready":
            first.succeed()
            await turns()
        second.fail()
        with pytest.raises(ChildStartError):
            await task
        assert first.over.done()
        assert serving.moved() == {}
        assert serving.served == ["old", "old"]
        assert [each.plan.models for each in serving.replicas] == [("old",), ("old",)]
        assert not any(worker.over.done() for worker in made[:2])


async def test_where_a_worker_dies_while_another_starts_none_takes_over(made):
    async with Serving(made) as serving:
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns()
        _, _, first, second = made
        first.succeed()
        await turns()
        first.kill("it died")
        second.succeed()
        with pytest.raises(ChildStartError):
            await task
        assert second.over.done()
        assert serving.served == ["old", "old"]


async def test_a_hand_over_goes_on_when_its_caller_leaves(made):
    async with Serving(made) as serving:
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns()
        task.cancel()
        for worker in made[2:]:
            worker.succeed()
        await turns()
        assert serving.served == ["new", "new"]
        for old in made[:2]:
            old.drain()
        await turns()
        assert [worker.over.done() for worker in made] == [True, True, False, False]


async def test_a_replica_that_is_broken_does_not_stop_a_hand_over_and_follows_it_later(made):
    async with Serving(made) as serving:
        broken(serving.replicas[1])
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns()
        assert len(made) == 3
        made[2].succeed()
        made[0].drain()
        await task
        assert [each.plan.models for each in serving.replicas] == [("new",), ("new",)]


async def test_stopping_ends_a_hand_over_that_is_under_way(made):
    async with Serving(made) as serving:
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns()
        made[2].succeed()
        await turns()
    await asyncio.gather(task, return_exceptions=True)
    assert all(worker.over.done() for worker in made)


async def staged(serving, made):
    """Let the first worker serve a quick plan and start a compiled one; return its replica and the new worker."""
    replica = serving.replicas[0]
    replica.plan = replace(replica.plan, quick=True)
    serving.handovers.compile(replica.child)
    await turns()
    return replica, made[-1]


async def test_a_compiler_has_time_of_its_own_and_after_a_crash_the_start_is_quick_again(made):
    async with Serving(made) as serving:
        replica, compiling = await staged(serving, made)
        assert (compiling.plan.quick, compiling.plan.start_timeout_s) == (False, 3600)
        old = replica.child
        compiling.succeed()
        await turns()
        old.drain()
        await turns()
        assert replica.child is compiling
        compiling.kill("it crashed")
        await turns(30)
        assert made[-1] is not compiling
        assert (made[-1].plan.quick, made[-1].plan.start_timeout_s) == (True, 600)
        made[-1].succeed()
        await turns()
        assert replica.status is PlaceStatus.READY


async def test_a_compilation_that_fails_is_tried_again(made, monkeypatch):
    monkeypatch.setattr("app.fleet.handover._COMPILE_PAUSES_S", (0.0, 0.0))
    async with Serving(made) as serving:
        replica, compiling = await staged(serving, made)
        serving_meanwhile = replica.child
        compiling.fail()
        await turns(30)
        again = made[-1]
        assert again is not compiling
        assert (replica.child, again.plan.quick) == (serving_meanwhile, False)
        again.succeed()
        await turns()
        serving_meanwhile.drain()
        await turns()
        assert replica.child is again
        assert serving.moved() == {"handovers null:0 compiled": 1}


async def test_new_models_do_not_wait_for_a_compiler(made):
    async with Serving(made) as serving:
        _, compiling = await staged(serving, made)
        task = asyncio.create_task(serving.handovers.run(serving.handovers.to(("new",), "load")))
        await turns(30)
        assert compiling.over.done()
        for worker in made[-2:]:
            worker.succeed()
        await turns()
        for worker in made:
            worker.drain()
        await task
        assert serving.served == ["new", "new"]


async def test_batch_sizes_that_a_worker_has_found_are_kept_and_not_searched_again(made):
    kept = {}
    async with Serving(made) as serving:
        serving.handovers._keep_sizes = kept.__setitem__
        for replica in serving.replicas:
            growing = (ModelPlan("old", "null", "fp32", (1, 2), grows=True),)
            replica.plan = replace(replica.plan, quick=True, plans=growing)
        first, second = serving.replicas
        serving.handovers.compile(first.child)
        [compiling] = serving.handovers._tasks
        await turns()
        searching = made[-1]
        assert searching.plan.plans[0].grows
        searching.succeed(loaded=(SimpleNamespace(latency_s={1: 0.1, 2: 0.1, 4: 0.1}),))
        await turns()
        next(worker for worker in made if worker.device == first.device).drain()
        await asyncio.wait_for(compiling, 10)
        found = ModelPlan("old", "null", "fp32", (1, 2, 4))
        assert kept == {"null": {0: (1, 2, 4)}}
        assert first.plan.plans == (found,), "a start after a crash has them, too"
        serving.handovers.compile(second.child)
        await turns(30)
        assert made[-1].device == second.device
        assert made[-1].plan.plans == (found,)


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
        replica.child.ready = replace_struct(replica.child.ready, staged=True)
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
