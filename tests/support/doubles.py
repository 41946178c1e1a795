"""Doubles of workers, decoders and a fleet's processes: objects that do what a test says, and start nothing.

    dispatching ─► a fleet without processes, its Submissions ─► Worker, Decoders: what they were given

Doubles that speak the real messages over sockets, in virtual time, are in tests/support/virtual_service.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from app import clock
from app.config import Settings
from app.core import DecodedBy, Loaded
from app.decoding import pool
from app.decoding.waiting import DecodeQueue, ImageLimits, Outcome, PendingImage
from app.fleet.fleet import Fleet
from app.fleet.process import Owner, WorkerProcess
from app.ingress.ingress import Replies
from app.link import Content, Frame, Result, Tables, Terms
from app.observability.metrics import Metrics
from app.processes.place import ChildStatus, PlaceStatus
from app.serving.submissions import Submissions
from app.worker.messages import Done, ModelPlan, Run, WorkerPlan
from backends import Device
from models import Options


def loaded_as(
    engine: str,
    latency_s: dict[int, float],
    depth: int = 1,
    *,
    memory_bytes: int = 0,
    load_s: float = 0,
    model: int = 0,
) -> Loaded:
    decoding = DecodedBy("host", "", {})
    found: Any = [*latency_s], {}, {}, {}, decoding, memory_bytes, load_s, model, latency_s, depth
    return Loaded("null:0", engine, "fp32", False, *found)


@dataclass(eq=False, frozen=True)
class SmallModel:
    name: str = "m"
    input_shape: tuple[int, ...] = (4,)
    weights: str = "random"
    is_program: bool = False
    is_foreign: bool = False


MODEL = SmallModel()
SLOTS = 64
IMAGE = Frame(np.zeros(4, np.uint8), 2, 2)


async def turns(number: int = 10) -> None:
    """Run the event loop so often: everything that needs no wait has happened then."""
    for _ in range(number):
        await asyncio.sleep(0)


class Process:
    """Double of a process that ends when it is killed, unless it cannot be. No process of this system has its `pid`."""

    pid = 1 << 30

    def __init__(self, *, mortal: bool = True) -> None:
        self.mortal, self.killed = mortal, 0
        self.exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        self.killed += not self.exited.done()
        if self.mortal:
            self.exit(-signal.SIGKILL)

    def exit(self, status: int) -> None:
        if not self.exited.done():
            self.exited.set_result(status)

    async def ends_within(self, limit_s: float) -> bool:
        await asyncio.wait((self.exited,), timeout=limit_s)
        return self.exited.done()


def plan_of(*models: Any, **more: Any) -> WorkerPlan:
    device = Device("null:0", "null", memory_bytes=0, auto_precision="fp32")
    return WorkerPlan(tuple(ModelPlan(model, "null", "fp32", (1,)) for model in models), device, **more)


def owner(**handled: Callable[..., None]) -> Any:
    """Return an owner of workers; what is not given does nothing. `worker_reported=…`, and others of Owner."""
    names = [name for name in vars(Owner) if name.startswith("worker_")]
    return SimpleNamespace(**{name: handled.get(name, lambda *_: None) for name in names})


class Worker(WorkerProcess):
    """Double that keeps the messages it is sent and starts no process. It serves at once, or with `starts` when the
    test says so; it has work until `drain`.
    """

    def __init__(
        self,
        name: str = "null:0#1",
        depth: int = 1,
        models: Sequence[Any] = (MODEL,),
        *,
        latency_s: Mapping[int, float] = MappingProxyType({1: 0.001, 8: 0.002}),
        starts: bool = False,
        plan: WorkerPlan | None = None,
        owned_by: Owner | None = None,
    ) -> None:
        device = name.partition("#")[0]
        super().__init__(device, plan or plan_of(*models), None, owned_by or owner())  # type: ignore[arg-type]
        self.name = name
        self._reports = [
            loaded_as("null", dict(latency_s), depth, model=index) for index, model in enumerate(models) if model
        ]
        self.sent: list[Any] = []
        self.talk: Any = SimpleNamespace(say=self.sent.append, flush=lambda: None, end=self._ended)
        self.works = True
        self._models: dict[int, SmallModel] = {
            index: replace(model, weights=name) for index, model in enumerate(models) if model
        }
        if not starts:
            self.has_served = True
            self.succeed()
            self.move(ChildStatus.READY)

    def model(self, index: int) -> Any:
        return self._models[index]

    @property
    def runs(self) -> list[Run]:
        return [message for message in self.sent if isinstance(message, Run)]

    def succeed(self) -> None:
        for each in self._reports:
            self.loaded[each.model] = each
        self.move(ChildStatus.PREPARED)

    def fail(self) -> None:
        self.end("it could not start")

    def drain(self) -> None:
        self.works = False
        self.leave()

    def lose(self) -> None:
        self.kill("it cannot be killed")
        self.move(ChildStatus.QUARANTINED)

    async def begin(self) -> None:
        self.process = Process()  # type: ignore[assignment]

    def answer_s(self) -> float:
        return math.inf

    def has_work(self) -> bool:
        return self.works

    def _ended(self, _: str) -> None:
        if isinstance(self.process, Process) and self.process.mortal:
            self.process.exit(0)


class StartedWorkers(list[Worker]):
    """Double of the class `WorkerProcess`, for a replica: each worker waits for the test to make it ready."""

    def __call__(self, device: str, plan: WorkerPlan, arena: object, owner: Owner) -> Worker:
        self.append(Worker(f"{device}#{len(self)}", starts=True, plan=plan, owned_by=owner))
        return self[-1]


class Decoders:
    """Double of app.decoding.pool.Decoders: `given` are its images, `again` those that came once more."""

    def __init__(self) -> None:
        self.queue = DecodeQueue(8, 2, ImageLimits(queue=0, max_pixels=0))
        self.given: list[PendingImage] = []
        self.again: list[PendingImage] = []
        self.dropped: list[PendingImage] = []

    def decode(self, image: PendingImage, *, client: str = "", again: bool = False) -> None:
        self.given.append(image)
        if again:
            self.again.append(image)

    def drop(self, image: PendingImage) -> None:
        image.wanted -= 1
        self.dropped.append(image)

    def end(self, outcome: Outcome) -> None:
        given, self.given = self.given, []
        for image in given:
            image.ended(image, outcome)


class Decoder(pool.DecoderProcess):
    """Double that keeps the jobs it is sent."""

    pid = 1

    def __init__(self, of: pool.Decoders, number: int) -> None:
        super().__init__(of, number)
        self.move(ChildStatus.READY)
        self.inbox.close()
        self.inbox = self  # type: ignore[assignment]
        self.jobs: list[Any] = []

    def write(self, buffer: int, body: Any, tail: bytes) -> None:
        pass

    def trim(self, buffer: int, used: int) -> None:
        pass

    def flush(self) -> None:
        self.jobs += self.out
        self.out.clear()


def _replica(status: str) -> Any:
    return SimpleNamespace(
        device="null:0", status=PlaceStatus(status), reason="", plan=SimpleNamespace(has=lambda _: True)
    )


def fleet_of(models: Sequence[Any] = (MODEL,), **settings: Any) -> Fleet:
    """Make a fleet that starts nothing, inside a running event loop. The caller closes its arena."""
    choice = SimpleNamespace(devices=("null:0",), vendor="null")
    given = {"models": "m", "batch_sizes": "1,8", "queue_size": SLOTS - 32, **settings}
    fleet = Fleet(Settings(**given), choice, models, Metrics(), None)  # type: ignore[arg-type]
    fleet.replicas += [_replica("ready")]
    fleet._keep_in_background = lambda *_: None  # type: ignore[method-assign]  # Nothing was measured.
    return fleet


def tables_of(fleet: Fleet, administration: Any = None) -> Tables:
    return Tables(fleet._settings, fleet.models, {}, fleet._metrics, None, False, administration)


@contextlib.asynccontextmanager
async def dispatching(
    *workers: Worker,
    replicas: Iterable[str] = ("ready",),
    decoders: Decoders | None = None,
    models: Sequence[Any] = (MODEL,),
) -> AsyncIterator[Any]:
    """Run a fleet with these workers, its `link` and `replies`; at the end nothing is in flight, and no slot taken.

    `replicas`: states.
    """
    fleet: Any = fleet_of(models)
    fleet.replicas[:] = map(_replica, replicas)
    for worker in workers:
        fleet.worker_ready(worker)
    fleet.link = Submissions(tables_of(fleet), fleet, decoders, reads_pixels=decoders is not None)  # type: ignore[arg-type]
    fleet.replies = Replies(fleet.link)
    free = free_slots(fleet)
    try:
        yield fleet
        assert not fleet.link._under_way
        assert free_slots(fleet) == free
    finally:
        fleet.dispatcher.stop()
        fleet.arena.close()


def ask(
    fleet: Any, images: int = 1, lasts_s: float = 60.0, content: Content = IMAGE, **terms: Any
) -> list[asyncio.Task[Result]]:
    """Submit so many requests of one image; return tasks of their results."""
    tasks = []
    for _ in range(images):
        room = fleet.link.reserve(fleet.models["m"], 1, Terms(clock.monotonic() + lasts_s, **terms))
        tasks.append(submit(fleet, room, 0, content=content))
    return tasks


def submit(
    fleet: Any, room: Any, position: int, *, is_last: bool = True, content: Content = IMAGE
) -> asyncio.Task[Result]:
    """Submit an item whose slot is filled; return a task of its result."""
    [(token, reply)] = fleet.replies.submit(room, content, Options(), position)

    async def result() -> Result:
        with room if is_last else contextlib.nullcontext():
            try:
                return await reply  # type: ignore[no-any-return]
            except asyncio.CancelledError:
                fleet.link.cancel(token)
                raise

    return asyncio.ensure_future(result())


def done(run: Run, results: Sequence[Any] | None = None, **more: Any) -> tuple[Done, list[Any]]:
    return Done(run.batch_id, (), 0.001, **more), [()] * len(run.slots) if results is None else list(results)


def hear(fleet: Any, worker: Worker, message: Any) -> None:
    if isinstance(message, tuple):
        fleet.worker_computed(worker, *message)
    else:
        fleet.worker_reported(worker, message)


def free_slots(fleet: Any) -> int:
    """Count the free slots: take all of them, and give them back."""
    slots = fleet.models["m"].slots
    taken: list[int] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(slots.take())
    for slot in taken:
        slots.give(slot)
    return len(taken)


def counting(metrics: Metrics) -> Callable[[], Mapping[str, float]]:
    """Return a function that returns the changes since this call, of each of anychip's counters, and of each
    histogram's number of samples; unchanged ones are left out. `"wasted m"`: the name and the labels.
    """

    def counts() -> dict[str, float]:
        return {
            " ".join((family.name.removeprefix("anychip_"), *sample.labels.values())): sample.value
            for family in metrics.registry.collect()
            if family.name.startswith("anychip_") and family.type in ("counter", "histogram")
            for sample in family.samples
            if sample.name in (f"{family.name}_total", f"{family.name}_count")
        }

    before = counts()
    return lambda: {
        name: value - before.get(name, 0) for name, value in counts().items() if value != before.get(name, 0)
    }
