"""What the owner counts: each step moves the counters that are named after it, and no other counter."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from app.decoding.waiting import DecodeFailedError, DecodeQueueFullError
from app.errors import ClientLeftError, ServiceError
from app.fleet.residents import Residents
from app.fleet.submission import ModelPool
from app.images.header import InvalidImageError
from app.link import Terms
from app.observability.metrics import BUSIEST, BusiestClients, Metrics, Recorder
from app.scheduling.queue import Item, Reservation
from app.scheduling.scheduler import Scheduler
from app.worker.messages import LoadModel, ModelUnloaded, NotLoaded, UnloadModel
from tests.support.doubles import (
    MODEL,
    Decoders,
    SmallModel,
    Worker,
    ask,
    counting,
    dispatching,
    done,
    hear,
    loaded_as,
    turns,
)

FAR = 10.0**9


def refused(fleet, count, deadline_s=FAR):
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
        fleet.worker_ready(Worker(latency_s={1: 3000.0, 8: 3000.0}))
        loop = asyncio.get_running_loop()
        fleet.link.reserve(fleet.models["m"], 1, Terms(FAR)).__exit__()  # Else the next one is a probe.
        assert refused(fleet, 2, loop.time() + 2000) == "DEADLINE_UNREACHABLE"
        assert refused(fleet, 4, 0.0) == "DEADLINE_EXCEEDED"
        assert moved() == {"rejected m queue_full": 3, "rejected m deadline": 2, "expired m upload": 4}


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
        moved = counting(fleet._metrics)
        [task] = ask(fleet, content=b"image")
        await turns()
        decoders.end(outcome)
        with pytest.raises(ServiceError) as error:
            await task
        assert (error.value.code, moved()) == (code, counts)


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
        [sizes] = [series for labels, series in fleet._metrics.batch_size.series.items() if labels == ("m", "null:0")]
        assert sizes.sum == 3


async def test_what_has_become_hopeless_in_the_queue_is_counted_there_and_not_computed(virtual_time):
    async with dispatching(replicas=("starting",)) as fleet:
        moved, tasks = counting(fleet._metrics), ask(fleet, 2, lasts_s=5)
        await turns()
        asyncio.get_running_loop().stand_still(5)  # The worker is there before the timer of their deadline.
        worker = Worker()
        fleet.worker_ready(worker)
        for task in tasks:
            with pytest.raises(ServiceError) as late:
                await task
            assert late.value.code == "DEADLINE_EXCEEDED"
        assert moved() == {"expired m queue": 2}
        assert worker.runs == []


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

    def lose(self, worker):
        self.workers.pop(worker.name, None)
        self.scheduler.remove_worker(worker.name)
        self.residents.worker_gone(worker, "killed by signal 9")

    def come(self, name):
        worker = self.workers[name] = Worker(name, models=(None, None))
        self.scheduler.add_worker(worker.name, {})
        self.residents.worker_ready()
        return worker

    def ask(self, name, deadline_s=FAR):
        self.residents.ask(name, deadline_s, "one")

    def answer(self, kind):
        for worker in self.workers.values():
            for message in [each for each in worker.sent if isinstance(each, kind)]:
                worker.sent.remove(message)
                answer = ModelUnloaded(message.model) if kind is UnloadModel else loaded(message.model)
                self.residents.received(worker, answer)


def loaded(model):
    return loaded_as("null", {1: 0.001}, memory_bytes=60, load_s=1.0, model=model)


@pytest.fixture
async def demand():
    made = OnDemand()
    yield made
    made.residents.stop()


async def test_a_load_is_counted_once_for_all_workers_and_so_is_an_unload(virtual_time, demand):
    loop = asyncio.get_running_loop()
    await demand.begin()
    demand.ask("a")
    await turns()
    demand.answer(LoadModel)
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
    demand.answer(LoadModel)
    assert demand.moved() == {"model_loads a loaded": 1, "model_loads a unloaded": 1, "model_loads b loaded": 1}


async def test_a_load_that_fails_is_counted_and_those_who_wait_for_it_are_refused(virtual_time, demand):
    await demand.begin()
    demand.ask("a")
    await turns()
    first, second = demand.workers.values()
    demand.residents.received(first, NotLoaded(0, "the file is gone"))
    assert demand.moved() == {"model_loads a failed": 1}
    assert demand.refused == ["a"]
    demand.residents.received(second, loaded(0))
    await turns()
    assert demand.moved() == {"model_loads a failed": 1}, "it was never there"


@pytest.mark.parametrize("leaving", [False, True], ids=["while it loads", "while another one leaves for it"])
async def test_a_worker_that_ends_costs_no_request_of_a_model_on_its_way(virtual_time, leaving, demand):
    loop = asyncio.get_running_loop()
    await demand.begin()
    _, other = demand.workers.popitem()
    demand.scheduler.remove_worker(other.name)
    demand.ask("a")
    await turns()
    demand.answer(LoadModel)
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
    demand.answer(LoadModel)
    assert demand.scheduler.serving["b"]
    assert not demand.scheduler.serving["a"]
    assert demand.refused == []


async def test_after_a_crash_a_model_is_loaded_before_those_that_nobody_waits_for(virtual_time, demand):
    await demand.begin(120)
    for name in "ab":
        demand.ask(name)
        await turns()
        demand.answer(LoadModel)
    for worker in list(demand.workers.values()):
        demand.lose(worker)
    loop = asyncio.get_running_loop()
    demand.scheduler.reserve(reservation := Reservation("a", 1, 0, FAR), loop.time())
    demand.scheduler.enqueue(Item(reservation, 0), loop.time())
    new = demand.come("null:0#3")  # b was used later.
    assert [each.model for each in new.sent if isinstance(each, LoadModel)] == [0]
    with pytest.raises(ServiceError, match="b is not loaded"):
        demand.ask("b", loop.time() + 1.5)  # After a: two seconds.
    demand.ask("b", loop.time() + 2.5)
    demand.answer(LoadModel)
    await turns()
    assert [each.model for each in new.sent if isinstance(each, LoadModel)] == [1]


def test_a_flood_of_addresses_costs_bounded_memory_and_hides_nobody() -> None:
    clients = BusiestClients()
    for number in range(20_000):
        clients.count(f"10.0.{number >> 8}.{number & 255}", refused=True, now_s=number / 1000)
        if number % 10 == 0:
            clients.count("key:camera", refused=False, now_s=number / 1000)
    assert len(clients.busiest(10**6)) <= 1000
    assert (clients.busiest(1, now_s=20)[0].name, clients.busiest(1, now_s=20)[0].requests) == ("key:camera", 2000)


def test_prometheus_sees_ten_at_most() -> None:
    registry, clients = CollectorRegistry(), BusiestClients()
    registry.register(clients)
    for number in range(50):
        for _ in range(number):
            clients.count(f"10.0.0.{number}", refused=number == 49)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert len(lines) == 2 * BUSIEST
    assert 'anychip_client_requests_total{client="10.0.0.49",outcome="refused"} 49.0' in lines
    assert 'anychip_client_requests_total{client="10.0.0.48",outcome="answered"} 48.0' in lines
    assert not any('"10.0.0.1"' in line for line in lines)
