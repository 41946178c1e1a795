"""What the owner counts: each step moves the counters that are named after it, by what they say, and no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from app import clock
from app.decoding.waiting import DecodeFailedError, DecodeQueueFullError
from app.errors import ClientLeftError, ServiceError
from app.fleet.residents import Residents
from app.fleet.submission import ModelPool
from app.images.header import InvalidImageError
from app.link import Terms
from app.observability.metrics import Metrics
from app.observability.recorder import Recorder
from app.scheduling.scheduler import Scheduler
from app.worker.messages import Failed, LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from models import Placement
from tests.support.doubles import (
    MODEL,
    Decoders,
    SmallModel,
    Worker,
    ask,
    counting,
    dispatching,
    done,
    free_slots,
    hear,
    loaded_as,
    turns,
)
from tests.support.queueing import enqueue, reserve

FAR = 10.0**9


def refused(fleet, count, deadline_s=FAR):
    """Return the code with which a request of so many images is refused."""
    with pytest.raises(ServiceError) as error:
        fleet.link.reserve(fleet.models["m"], count, Terms(deadline_s))
    return error.value.code


async def test_a_refusal_is_counted_by_its_images_and_its_reason():
    async with dispatching(replicas=("starting",)) as fleet:
        moved = counting(fleet._metrics)
        with fleet.link.reserve(fleet.models["m"], 30, Terms(FAR)):
            assert refused(fleet, 3) == "QUEUE_FULL"
            assert moved() == {"rejected m queue_full": 3}
        assert refused(fleet, 33) == "INVALID_REQUEST"
        assert moved() == {"rejected m queue_full": 3}, "what never fits is the client's mistake"
        fleet._worker_ready(Worker(latency_s={1: 3000.0, 8: 3000.0}))
        loop = asyncio.get_running_loop()
        fleet.link.reserve(fleet.models["m"], 1, Terms(FAR)).__exit__()  # Else the next one is a probe.
        assert refused(fleet, 2, loop.time() + 2000) == "DEADLINE_UNREACHABLE"
        assert refused(fleet, 4, 0.0) == "DEADLINE_EXCEEDED"
        assert moved() == {"rejected m queue_full": 3, "rejected m deadline": 2, "expired m upload": 4}


async def test_a_check_stands_for_a_moment_and_for_the_same_request_alone(monkeypatch):
    now_s = 5.0
    monkeypatch.setattr(clock, "monotonic", lambda: now_s)
    async with dispatching(replicas=("starting",)) as fleet:
        for images, deadline_s, priority, passes_s, stands in (
            (1, FAR, 0, 0.0, True),
            (1, FAR, 0, 0.002, False),
            (2, FAR, 0, 0.0, False),
            (1, FAR - 1, 0, 0.0, False),
            (1, FAR, 1, 0.0, False),
        ):
            terms = Terms(FAR)
            await fleet.link.check(fleet.models["m"], terms)
            checked = terms.room
            terms.deadline_s, terms.priority, now_s = deadline_s, priority, now_s + passes_s
            with fleet.link.reserve(fleet.models["m"], images, terms) as room:
                assert (room is checked) == stands
                assert (room.deadline_s, room.priority, room.images) == (deadline_s, priority, images)
                with fleet.link.reserve(fleet.models["m"], images, terms) as other:
                    assert other is not room


async def test_what_nobody_serves_is_counted_once_for_each_request():
    async with dispatching(replicas=("broken",)) as fleet:
        moved = counting(fleet._metrics)
        assert refused(fleet, 3) == "NOT_READY"
        assert moved() == {"rejected m not_ready": 1}
        fleet.models["m"].unloaded = True
        with pytest.raises(ServiceError):
            await fleet.link.check(fleet.models["m"], Terms(FAR))
        assert moved() == {"rejected m not_ready": 2}


@pytest.mark.parametrize(
    ("outcome", "code", "counts"),
    [
        (DecodeQueueFullError("256 images are waiting"), "QUEUE_FULL", {"rejected m decode_queue_full": 1}),
        (InvalidImageError("it is no image"), "INVALID_IMAGE", {}),
        (DecodeFailedError("it cannot be"), "INTERNAL", {}),
    ],
)
async def test_an_image_that_is_not_decoded_is_counted_where_that_is_a_refusal(outcome, code, counts):
    decoders = Decoders()
    async with dispatching(Worker(), decoders=decoders) as fleet:
        moved, before = counting(fleet._metrics), free_slots(fleet)
        [task] = ask(fleet, content=b"image")
        await turns()
        decoders.end(outcome)
        with pytest.raises(ServiceError) as error:
            await task
        assert (error.value.code, moved(), free_slots(fleet)) == (code, counts, before)


async def test_a_batch_is_counted_once_with_its_images_its_padding_and_its_time():
    worker = Worker()
    async with dispatching(worker) as fleet:
        moved, statistics = counting(fleet._metrics), fleet.models["m"].statistics
        tasks = ask(fleet, 3)
        await turns()
        assert moved() == {"batch_size m null:0": 1, "batch_padding m null:0": 5}
        hear(fleet, worker, done(worker.runs[0]))
        await asyncio.gather(*tasks)
        assert moved() == {"batch_size m null:0": 1, "batch_padding m null:0": 5, "batch_seconds m null:0": 1}
        assert {size: each.count for size, each in statistics.batches.items()} == {3: 1}
        [sizes] = [series for labels, series in fleet._metrics.batch_size.series() if labels == ("m", "null:0")]
        assert sizes.sum == 3


async def test_a_batch_that_the_devices_memory_did_not_hold_is_counted_once():
    worker = Worker()
    async with dispatching(worker) as fleet:
        moved = counting(fleet._metrics)
        for fitted in (0, 1):
            tasks = ask(fleet, 8)
            await turns()
            hear(fleet, worker, done(worker.runs[-1], fitted=fitted))
            await asyncio.gather(*tasks)
        assert moved() == {"batch_size m null:0": 2, "batch_seconds m null:0": 2, "out_of_memory m null:0": 1}


@pytest.mark.parametrize("end", ["the batch fails", "the worker dies"])
async def test_what_is_computed_again_is_counted_once_for_each_image_that_is_still_wanted(end):
    worker = Worker()
    async with dispatching(worker) as fleet:
        tasks = ask(fleet, 16)
        await turns()
        tasks[0].cancel()
        tasks[8].cancel()
        await turns()
        moved = counting(fleet._metrics)
        if end == "the batch fails":
            hear(fleet, worker, Failed(worker.runs[0].batch_id, "it failed"))
        else:
            fleet._worker_gone(worker, "it died")
        assert moved() == {"retried m": 7 if end == "the batch fails" else 14}
        if end == "the batch fails":
            fleet._worker_gone(worker, "it died")
        for task in tasks:
            task.cancel()
        await turns()


async def test_what_has_become_hopeless_in_the_queue_is_counted_there_and_not_computed(virtual_time):
    async with dispatching(replicas=("starting",)) as fleet:
        moved, tasks = counting(fleet._metrics), ask(fleet, 2, lasts_s=5)
        await turns()
        asyncio.get_running_loop().stand_still(5)  # The worker is there before the timer of their deadline.
        worker = Worker()
        fleet._worker_ready(worker)
        for task in tasks:
            with pytest.raises(ServiceError) as late:
                await task
            assert late.value.code == "DEADLINE_EXCEEDED"
        assert moved() == {"expired m queue": 2}
        assert worker.runs == []


async def test_files_are_counted_by_what_the_device_made_of_them():
    worker, decoders = Worker(), Decoders()
    async with dispatching(worker, decoders=decoders) as fleet:
        tasks = ask(fleet, 5, content=b"file")
        await turns()
        for item in [*fleet.link._under_way.values()][:4]:
            item.refill = lambda item: fleet.link._filling._decode([item], b"file", 0, rank_s=0.0)
        decoders.end(Placement(1, 1))
        await turns()
        moved = counting(fleet._metrics)
        hear(fleet, worker, done(worker.runs[0], undecoded=(1, 4)))
        assert moved() == {
            "device_decodes m null:0 decoded": 3,
            "device_decodes m null:0 refused": 1,
            "batch_seconds m null:0": 1,
        }, "the fifth was no file"
        decoders.end(Placement(1, 1))
        await turns()
        hear(fleet, worker, done(worker.runs[1]))
        await asyncio.gather(*tasks)


async def test_images_under_way_are_those_of_all_requests_that_have_not_ended():
    async with dispatching(replicas=("starting",)) as fleet:
        pool = fleet.models["m"]
        rooms = [fleet.link.reserve(pool, count, Terms(FAR)) for count in (1, 4, 7)]
        assert pool.images_under_way == 12
        rooms[1].__exit__()
        assert pool.images_under_way == 8
        for room in (rooms[0], rooms[2]):
            room.__exit__()
        assert pool.images_under_way == 0


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (ClientLeftError(), {"cancelled m upload": 1}),
        (ServiceError("DEADLINE_EXCEEDED", ""), {"expired m upload": 1}),
        (ServiceError("REQUEST_TIMEOUT", ""), {"expired m upload": 1}),
        (ServiceError("QUEUE_FULL", ""), {"rejected m buffer_full": 1}),
        (ServiceError("INVALID_REQUEST", ""), {}),
    ],
)
def test_a_body_that_does_not_arrive_is_counted_by_the_reason(error, counts):
    metrics = Metrics()
    pool, moved = ModelPool(0, MODEL, 1, metrics), counting(metrics)
    Recorder().upload_failed(pool.metrics, error)
    assert moved() == counts


class OnDemand:
    """Two models on demand, of which one fits, and two workers that load what they are told when the test says so."""

    def __init__(self):
        self.metrics = Metrics()
        self.pools = [ModelPool(index, SmallModel(name), 4, self.metrics) for index, name in enumerate("ab")]
        self.scheduler = Scheduler({"a": 9, "b": 9})
        self.workers = {f"null:0#{number}": Worker(f"null:0#{number}", models=(None, None)) for number in (1, 2)}
        for worker in self.workers.values():
            self.scheduler.add_worker(worker.name, {})
        self.told, self.refused = [], []
        self.residents = Residents(
            self.pools,
            self.scheduler,
            self.workers,
            self.metrics,
            changed=lambda: None,
            refuse=lambda name, reason: self.refused.append(name),
            load_timeout_s=600.0,
        )
        self.moved = counting(self.metrics)

    async def begin(self, budget_bytes=100):
        footprint = SimpleNamespace(memory_bytes=60, load_s=1.0)
        assert await self.residents.begin(budget_bytes, {"a": footprint, "b": footprint}) == ""

    async def with_both(self):
        """Both fit, are loaded, and one of the two workers is taken away."""
        await self.begin(120)
        for name in "ab":
            self.ask(name)
            await turns()
            self.answer(LoadModel, loaded=LOADED)
        _, worker = self.workers.popitem()
        self.lose(worker)

    def lose(self, worker):
        self.workers.pop(worker.name, None)
        self.scheduler.remove_worker(worker.name)
        self.residents.worker_gone(worker, "killed by signal 9")

    def come(self, name):
        """Add a ready worker that may have every model."""
        worker = self.workers[name] = Worker(name, models=(None, None))
        self.scheduler.add_worker(worker.name, {})
        self.residents.worker_ready()
        return worker

    def ask(self, name, deadline_s=FAR, client="one"):
        self.residents.ask(name, deadline_s, client)

    def answer(self, kind, **said):
        """Every worker answers what it was told of this kind."""
        for worker in self.workers.values():
            for message in [each for each in worker.sent if isinstance(each, kind)]:
                worker.sent.remove(message)
                answer = ModelUnloaded(message.model) if kind is UnloadModel else ModelLoaded(message.model, **said)
                self.residents.heard(worker, answer)


LOADED = loaded_as("null", {1: 0.001}, memory_bytes=60, load_s=1.0)


async def test_a_load_is_counted_once_for_all_workers_and_so_is_an_unload(virtual_time):
    demand, loop = OnDemand(), asyncio.get_running_loop()
    await demand.begin()
    demand.ask("a")
    await turns()
    demand.answer(LoadModel, loaded=LOADED)
    assert demand.moved() == {"model_loads a loaded": 1}
    demand.ask("a")
    await turns()
    assert demand.moved() == {"model_loads a loaded": 1}
    loop.stand_still(100)
    demand.ask("b")
    await asyncio.sleep(1)
    demand.answer(UnloadModel)
    assert demand.moved() == {"model_loads a loaded": 1, "model_loads a unloaded": 1}
    await turns()
    demand.answer(LoadModel, loaded=LOADED)
    assert demand.moved() == {"model_loads a loaded": 1, "model_loads a unloaded": 1, "model_loads b loaded": 1}
    demand.residents.stop()


async def test_whose_deadline_is_before_the_load_is_refused_as_loading_and_counted_once():
    demand, loop = OnDemand(), asyncio.get_running_loop()
    await demand.begin()
    with pytest.raises(ServiceError) as error:
        demand.ask("a", loop.time() + 0.5)
    assert error.value.code == "MODEL_LOADING"
    assert demand.moved() == {"rejected a loading": 1}
    demand.residents.stop()


async def test_before_the_memory_of_models_is_known_a_request_is_told_that_it_is_measured():
    demand = OnDemand()
    with pytest.raises(ServiceError, match="still being measured") as error:
        demand.ask("a", FAR)
    assert error.value.code == "MODEL_LOADING"
    demand.residents.stop()


async def test_a_load_that_fails_is_counted_and_those_who_wait_for_it_are_refused(virtual_time):
    demand = OnDemand()
    await demand.begin()
    demand.ask("a")
    await turns()
    first, second = demand.workers.values()
    demand.residents.heard(first, ModelLoaded(0, None, "the file is gone"))
    assert demand.moved() == {"model_loads a failed": 1}
    assert demand.refused == ["a"]
    demand.residents.heard(second, ModelLoaded(0, LOADED))
    await turns()
    assert demand.moved() == {"model_loads a failed": 1}, "it was never there"
    demand.residents.stop()


async def measured(demand, last):
    """Measure both models. Workers are lost, and come again, at each of the moments when a model loads or leaves."""
    begun = asyncio.create_task(demand.residents.begin(100, {}))
    lost = 0
    for number, (kind, said) in enumerate([(LoadModel, {"loaded": LOADED}), (UnloadModel, {})] * 4, 3):
        await turns()
        for name, worker in list(demand.workers.items())[: 2 if last else 1]:
            assert any(isinstance(each, kind) for each in worker.sent)
            demand.lose(worker)
            await turns()
            demand.come(f"{name}+{number}")
            lost += 1
        await asyncio.sleep(1)
        demand.answer(kind, **said)
    return lost, begun


@pytest.mark.parametrize("last", [False, True], ids=["one of two", "all"])
async def test_a_worker_that_ends_while_a_model_is_measured_ends_no_start(virtual_time, last):
    """While each load and each unload is under way."""
    demand = OnDemand()
    lost, begun = await measured(demand, last)
    await turns()
    assert begun.done()
    assert begun.result() == ""
    assert lost >= 8
    demand.ask("a")
    await asyncio.sleep(1)
    demand.answer(LoadModel, loaded=LOADED)
    assert demand.scheduler.serves("a")
    demand.residents.stop()


async def test_if_workers_keep_ending_while_a_model_is_measured_the_start_ends_and_says_why(virtual_time):
    demand = OnDemand()
    begun = asyncio.create_task(demand.residents.begin(100, {}))
    await turns()
    for worker in list(demand.workers.values()):
        demand.lose(worker)
    await turns()
    assert not begun.done(), "another worker is on its way"
    demand.residents.give_up("5 workers died in a row, the last one so: killed by signal 9")
    assert await begun == "a cannot be loaded: 5 workers died in a row, the last one so: killed by signal 9"
    demand.residents.stop()


async def test_a_load_that_hangs_while_it_is_measured_is_not_tried_again(virtual_time):
    demand = OnDemand()
    begun = asyncio.create_task(demand.residents.begin(100, {}))
    await asyncio.sleep(601)
    assert all(worker.over.done() for worker in demand.workers.values())
    assert await begun == "a cannot be loaded: it was not loaded within 600 s"
    demand.residents.stop()


@pytest.mark.parametrize("leaving", [False, True], ids=["while it loads", "while another one leaves for it"])
async def test_a_worker_that_ends_costs_no_request_of_a_model_on_its_way(virtual_time, leaving):
    """Of two models one fits."""
    demand, loop = OnDemand(), asyncio.get_running_loop()
    await demand.begin()
    _, other = demand.workers.popitem()
    demand.scheduler.remove_worker(other.name)
    demand.ask("a")
    await turns()
    demand.answer(LoadModel, loaded=LOADED)
    loop.stand_still(100)
    demand.ask("b")
    await asyncio.sleep(1)
    if not leaving:
        demand.answer(UnloadModel)
        await asyncio.sleep(1)
    [worker] = demand.workers.values()
    assert isinstance(worker.sent[-1], UnloadModel if leaving else LoadModel)
    demand.lose(worker)
    demand.ask("b")
    await turns()
    demand.come("null:0#3")
    await asyncio.sleep(1)
    demand.answer(UnloadModel)
    await asyncio.sleep(1)
    demand.answer(LoadModel, loaded=LOADED)
    assert demand.scheduler.serves("b")
    assert not demand.scheduler.serves("a")
    assert demand.refused == []
    demand.residents.stop()


async def test_a_load_that_hangs_costs_what_it_is_known_to_take_and_then_twice_that(virtual_time):
    demand = OnDemand()
    await demand.begin()
    _, worker = demand.workers.popitem()
    demand.scheduler.remove_worker(worker.name)
    demand.ask("a")
    for number, limit_s in enumerate((30, 60), 3):
        [worker] = demand.workers.values()
        await asyncio.sleep(limit_s - 2)
        assert not worker.over.done()
        await asyncio.sleep(4)
        assert worker.over.result() == f"a: it was not loaded within {limit_s} s"
        demand.workers.clear()
        demand.scheduler.remove_worker(worker.name)
        demand.residents.worker_gone(worker, "killed")
        new = demand.workers[f"null:0#{number}"] = Worker(f"null:0#{number}", models=(None, None))
        demand.scheduler.add_worker(new.name, {})
        demand.residents.worker_ready()
    demand.residents.stop()


async def test_each_load_after_a_crash_has_its_own_time(virtual_time):
    demand = OnDemand()
    await demand.with_both()
    [old] = demand.workers.values()
    demand.lose(old)
    new = demand.come("null:0#3")
    for _ in range(2):  # Each takes longer than known, and less than what is given up; together they take more.
        await asyncio.sleep(20)
        assert not new.over.done()
        first = next(each for each in new.sent if isinstance(each, LoadModel))
        new.sent.remove(first)
        demand.residents.heard(new, ModelLoaded(first.model, LOADED))
    await asyncio.sleep(1)
    assert not new.over.done()
    assert demand.scheduler.serves("a")
    assert demand.scheduler.serves("b")
    demand.residents.stop()


async def test_after_a_crash_a_model_is_loaded_before_those_that_nobody_waits_for(virtual_time):
    demand = OnDemand()
    await demand.with_both()
    [old] = demand.workers.values()
    demand.lose(old)
    loop = asyncio.get_running_loop()
    enqueue(demand.scheduler, reserve(demand.scheduler, "a", 1, FAR, 0, loop.time()), None, loop.time())
    new = demand.come("null:0#3")  # b was used later.
    assert [each.model for each in new.sent if isinstance(each, LoadModel)] == [0]
    with pytest.raises(ServiceError, match="b is not loaded"):
        demand.ask("b", loop.time() + 1.5)  # After a: two seconds.
    demand.ask("b", loop.time() + 2.5)
    demand.answer(LoadModel, loaded=LOADED)
    await turns()
    assert [each.model for each in new.sent if isinstance(each, LoadModel)] == [1]
    demand.residents.stop()


async def test_what_another_worker_serves_is_refused_to_nobody_while_a_new_one_loads_it(virtual_time):
    demand, loop = OnDemand(), asyncio.get_running_loop()
    await demand.with_both()
    demand.come("null:0#3")
    for name in "ab":
        demand.ask(name, loop.time() + 0.1)
    demand.residents.stop()
