"""Doubles of workers, decoders and a fleet's processes: objects that do what a test says, and start nothing.

    dispatching ─► a fleet without processes, its Submissions ─► Worker, Decoders: what they were given

Owns: these doubles, and the steps that most tests take with them. Doubles that speak the real messages over sockets, in
virtual time, are in tests/support/virtual_processes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from app import clock
from app.config import Settings
from app.core import DecodedBy, ServedOn
from app.decoder.messages import DecodePlan, jobs_in
from app.decoding.process import DecoderProcess
from app.decoding.waiting import Outcome, PendingImage
from app.fleet.fleet import Fleet
from app.fleet.process import WorkerStartError
from app.ingress.items import Replies
from app.link import Content, Frame, Result, Tables, Terms
from app.observability.metrics import Metrics
from app.processes.place import ChildStatus
from app.serving.submissions import Submissions
from app.worker.messages import Done, Loaded, Ready, Run
from models import Options


def loaded_as(
    engine: str,
    latency_s: dict[int, float],
    depth: int = 1,
    *,
    decoded_by: Any = "host",
    memory_bytes: int = 0,
    load_s: float = 0,
    refusals: Mapping[str, str] = MappingProxyType({}),
) -> Loaded:
    """Return a worker's report on a model that this engine serves."""
    decoding = DecodedBy(decoded_by, "", {})
    found: Any = [*latency_s], dict(refusals), {}, {}, decoding, memory_bytes, load_s
    return Loaded(ServedOn("null:0", engine, "fp32", False, *found), latency_s, depth)


@dataclass(eq=False, frozen=True)
class SmallModel:
    """The fields of a model that queues and workers use."""

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


class Worker:
    """Double that keeps the messages it is sent; it is ready at once, or with `starts` when the test says so."""

    def __init__(
        self,
        name: str = "null:0#1",
        depth: int = 1,
        models: Sequence[Any] = (MODEL,),
        *,
        decodes: bool = False,
        latency_s: Mapping[int, float] = MappingProxyType({1: 0.001, 8: 0.002}),
        starts: bool = False,
        plan: Any = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.id, self.device = name, name.partition("#")[0]
        self.plan = plan or SimpleNamespace(load=SimpleNamespace(models=models))
        loaded = loaded_as("null", dict(latency_s), depth, decoded_by="device" if decodes else "host")
        self._ready = Ready(self.device, "null", tuple(loaded if model else None for model in models))
        self.ready: Any = None if starts else self._ready
        self.pid, self.end, self.answered = None, "died", True
        self.retiring = self.abandoned = self.stopped = False
        self.drained = asyncio.Event()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.sent: list[Any] = []
        self._started: asyncio.Future[None] = loop.create_future()
        self._models: dict[int, SmallModel] = {
            index: replace(model, weights=name) for index, model in enumerate(models) if model
        }

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def model(self, index: int) -> SmallModel:
        return self._models[index]

    def hold(self, index: int, loaded: Any) -> None:
        held = tuple(loaded if number == index else each for number, each in enumerate(self.ready.loaded))
        self.ready = Ready(self.device, "null", held)

    @property
    def runs(self) -> list[Run]:
        """Batches that it was sent."""
        return [message for message in self.sent if isinstance(message, Run)]

    def succeed(self, *, staged: bool = False, loaded: Sequence[Any] | None = None) -> None:
        """Become ready."""
        self.ready = SimpleNamespace(staged=staged, loaded=self._ready.loaded if loaded is None else loaded)
        self._started.set_result(None)

    def fail(self) -> None:
        """Fail to start."""
        self.ended.set_result("it could not start")
        self._started.set_exception(WorkerStartError("it could not start", self))  # type: ignore[arg-type]

    async def start(self) -> None:
        await asyncio.shield(self._started)

    def kill(self, reason: str, *, end: str = "") -> None:
        self.end = end or self.end
        if not self.ended.done():
            self.ended.set_result(reason)

    async def stop(self) -> None:
        self.stopped = True
        self.kill("it was stopped")


class StartedWorkers(list[Worker]):
    """Double of the class `WorkerProcess`, for a replica: each worker waits for the test to make it ready."""

    def __call__(self, device: str, plan: Any, *_: object) -> Worker:
        """Make a worker."""
        self.append(Worker(f"{device}#{len(self)}", starts=True, plan=plan))
        return self[-1]


class Decoders:
    """Double of app.decoding.pool.Decoders: `given` are its images, `again` those that came once more."""

    seconds_an_image = 0.0

    def __init__(self) -> None:
        self.given: list[PendingImage] = []
        self.again: list[PendingImage] = []
        self.dropped: list[PendingImage] = []

    def decode(self, image: PendingImage, *, client: str = "", again: bool = False) -> None:
        self.given.append(image)
        if again:
            self.again.append(image)

    def wait_s(self, *_: object) -> float:
        return 0.0

    def drop(self, image: PendingImage) -> None:
        image.wanted -= 1
        self.dropped.append(image)

    def end(self, outcome: Outcome) -> None:
        """End all given images with this outcome."""
        given, self.given = self.given, []
        for image in given:
            image.ended(image, outcome)


class Decoder(DecoderProcess):
    """Double that keeps the jobs it is sent."""

    pid = 1

    def __init__(self, number: int, plan: DecodePlan) -> None:
        super().__init__(SimpleNamespace(plan=plan), number)  # type: ignore[arg-type]
        self.move(ChildStatus.READY)
        self.inbox.close()
        self.inbox = self  # type: ignore[assignment]
        self.jobs: list[Any] = []

    def write(self, buffer: int, body: Any, tail: bytes) -> None:
        pass

    def trim(self, buffer: int, used: int) -> None:
        pass

    def flush(self) -> None:
        self.jobs += jobs_in(bytes(self.out))
        self.out.clear()


PLAN = SimpleNamespace(has=lambda index: True)


def fleet_of(models: Sequence[Any] = (MODEL,), **settings: Any) -> Fleet:
    """Make a fleet that starts nothing, inside a running event loop. The caller closes its arena."""
    choice = SimpleNamespace(devices=("null:0",), vendor="null")
    given = {"models": "m", "batch_sizes": "1,8", "queue_size": SLOTS - 32, **settings}
    fleet = Fleet(Settings(**given), choice, models, Metrics(), None)  # type: ignore[arg-type]
    fleet.replicas += [SimpleNamespace(device="null:0", state="ready", reason="", plan=PLAN)]  # type: ignore[list-item]
    fleet._keep_in_background = lambda *_: None  # type: ignore[method-assign]  # Nothing was measured.
    return fleet


def tables_of(fleet: Fleet, administration: Any = None) -> Tables:
    """Make tables of the fleet's models."""
    return Tables(fleet._settings, fleet.models, {}, {}, fleet._metrics, None, False, administration)


@contextlib.asynccontextmanager
async def dispatching(
    *workers: Worker,
    replicas: Iterable[str] = ("ready",),
    decoders: Decoders | None = None,
    models: Sequence[Any] = (MODEL,),
) -> AsyncIterator[Any]:
    """Run a fleet with these workers, its `link` and `replies`; at the end nothing is in flight. `replicas`: states."""
    fleet: Any = fleet_of(models)
    fleet.replicas[:] = [SimpleNamespace(device="null:0", state=state, reason="", plan=PLAN) for state in replicas]
    for worker in workers:
        fleet._worker_ready(worker)
    fleet.link = Submissions(tables_of(fleet), fleet, decoders, reads_pixels=decoders is not None)  # type: ignore[arg-type]
    fleet.replies = Replies(fleet.link)
    try:
        yield fleet
        assert not fleet.link._under_way
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
                fleet.replies.cancel(token)
                raise

    return asyncio.ensure_future(result())


def done(run: Run, results: Sequence[Any] | None = None, **more: Any) -> tuple[Done, list[Any]]:
    """Make a worker's message on a batch, and the batch's results."""
    return Done(run.batch_id, (), 0.001, **more), [()] * len(run.slots) if results is None else list(results)


def hear(fleet: Any, worker: Worker, message: Any) -> None:
    """Give the fleet this message of a worker."""
    if isinstance(message, tuple):
        fleet.dispatcher.computed(worker, *message)
    else:
        fleet._worker_message(worker, message)


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
