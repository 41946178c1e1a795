"""Service in virtual time, owner and ingress; clients call the ingress like a transport, without one.

    async with serving(decode_s=0.01, batch_s=0.008) as service:
        outcome = await service.ask(timeout_s=0.25)

What decodes and computes are doubles in the event loop: the other ends of the socket pairs of DecoderProcess and
WorkerProcess, which read and write the real messages. Of the server only two names are replaced, those that make
processes (`serving`): as parameters they would pass through five constructors that have no other use for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

from app import clock
from app.access.access import HIGHEST_PRIORITY, Caller
from app.access.keys import CallerLimits
from app.config import Settings
from app.decoder.messages import PACKET_BYTES, Decoded, Inbox, Job, Status
from app.decoding import pool as decoding_pool
from app.decoding.pool import CREDITS
from app.errors import ServiceError
from app.fleet import process as fleet_process
from app.ingress.context import RequestContext
from app.ingress.ingress import Call, Ingress
from app.ingress.prediction import Answer, computed
from app.link import ServedModel, Terms
from app.processes.channel import Channel, close_all, reader, socket_pair, to_packet
from app.serving.opening import Opening, chosen
from app.serving.service import Service
from app.worker.main import Begin
from app.worker.messages import BEAT_INTERVAL_S, Beat, Done, Run, Stats, Stop, ToWorker
from app.worker.results import write_results
from models import Options
from tests.support import doubles
from tests.support.doubles import loaded_as

FIRST_PID = doubles.Process.pid
_read, _jobs = reader(ToWorker), reader(Job)


class Process(doubles.Process):
    """Process that does one work after the other, each for so long, by its own clock: a late loop changes nothing."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.pid = pid
        self._waiting: deque[tuple[float, Any]] = deque()  # Begin of the wait, work.
        self._free_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def takes_s(self, work: Any) -> float:
        raise NotImplementedError

    def begun(self, work: Any) -> None:
        """Note that it begins to work on this."""

    def ended(self, work: Any) -> None:
        raise NotImplementedError

    def add(self, work: Any) -> None:
        self._waiting.append((self.loop.time(), work))
        if self._timer is None:
            self._next()

    def _next(self) -> None:
        if self._waiting:
            since_s, work = self._waiting.popleft()
            takes_s = self.takes_s(work)
            self._free_s = max(self._free_s, since_s) + takes_s
            self.begun(work)
            self._timer = self.loop.call_at(self._free_s, self._done, work)

    def _done(self, work: Any) -> None:
        self._timer = None
        self.ended(work)
        if self._timer is None:
            self._next()

    def pause(self, seconds: float) -> None:
        """Stand still for so long from now, like a stopped process."""
        self._free_s = max(self._free_s, self.loop.time()) + seconds
        if self._timer is not None:
            timer, work = self._timer, self._timer._args[0]
            timer.cancel()
            self._timer = self.loop.call_at(timer.when() + seconds, self._done, work)

    def kill(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        super().kill()


class Decoder(Process):
    """Process that decodes an image in `image_s(job)` of all; the slot's content is unchanged."""

    def __init__(self, pid: int, connection: int, inbox: int, all_of_them: Processes) -> None:
        super().__init__(pid)
        self._all, self.images = all_of_them, 0
        self._socket = socket.socket(fileno=os.dup(connection))
        self._socket.setblocking(False)
        self._memory = os.dup(inbox)
        self._inbox = Inbox(CREDITS, (os.fstat(inbox).st_size - 4096) // CREDITS, self._memory)
        self.loop.add_reader(self._socket, self._readable)

    def takes_s(self, work: Job) -> float:
        return self._all.image_s(work)

    def begun(self, work: Job) -> None:
        self._inbox.begin(work.token)

    def ended(self, work: Job) -> None:
        self._inbox.end()
        self.images += 1
        with contextlib.suppress(OSError):
            self._socket.send(to_packet([Decoded(work.token, Status.PLACED, 640, 480)]))

    def _readable(self) -> None:
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:
            self.kill()
            return
        for job in _jobs(packet):
            self.add(job)

    def kill(self) -> None:
        if not self.exited.done():
            self.loop.remove_reader(self._socket)
            self._socket.close()
            os.close(self._memory)
        super().kill()


class Worker(Process):
    """Process that computes a batch in `batch_s(run)` of all; each result is a single zero."""

    def __init__(self, pid: int, end: socket.socket, all_of_them: Processes, models: int) -> None:
        super().__init__(pid)
        self._all = all_of_them
        self._channel = Channel(end)
        self._beat: asyncio.TimerHandle | None = None
        self.loop.add_reader(end, self._readable)
        for model in range(models):
            self._say(loaded_as("virtual", dict(all_of_them.latency_s), model=model))
        self._say(Stats(0, 0, 0, 0, 0))
        self._alive()

    def takes_s(self, work: Run) -> float:
        return self._all.batch_s(work)

    def ended(self, work: Run) -> None:
        layouts, small, _, _ = write_results([(np.zeros(1, np.float32),)] * len(work.slots))
        self._say(Done(work.batch_id, layouts, self.takes_s(work), small=small))

    def pause(self, seconds: float) -> None:
        super().pause(seconds)
        if self._beat is not None:
            self._beat.cancel()
            self._beat = self.loop.call_later(seconds, self._alive)

    def _say(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(to_packet((message,)))

    def _alive(self) -> None:
        self._say(Beat())
        self._beat = self.loop.call_later(BEAT_INTERVAL_S, self._alive)

    def _readable(self) -> None:
        try:
            messages = self._channel.receive()
        except (EOFError, OSError):
            self.kill()
            return
        for data in messages:
            for message in _read(data):
                match message:
                    case Run():
                        self.add(message)
                    case Stop():
                        self.kill()

    def kill(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if not self.exited.done():
            self.loop.remove_reader(self._channel.fileno())
            self._channel.close()
        super().kill()


@dataclass
class Processes:
    """Maker and keeper of the doubles of processes; also the double of decoders' ForkServer.

    `image_s`: of a job; `batch_s`: of a run, both from now on; `latency_s`: latency by batch size that a worker reports
    at its start.
    """

    image_s: Callable[[Job], float]
    batch_s: Callable[[Run], float]
    latency_s: Mapping[int, float]
    decoders: list[Decoder] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    pid: int = FIRST_PID - 1
    ready: bool = True

    def _pid(self) -> int:
        return FIRST_PID + len(self.decoders) + len(self.workers)

    async def spawn(self, begin: Begin, descriptors: Sequence[int], *, forks: bool) -> tuple[Worker, Channel]:
        close_all(descriptors)
        ours, theirs = socket_pair()
        self.workers.append(Worker(self._pid(), theirs, self, len(begin.pools)))
        return self.workers[-1], Channel(ours)

    async def fork(self, connection: int, inbox: int, *, fresh: bool = False) -> Decoder:
        self.decoders.append(Decoder(self._pid(), connection, inbox, self))
        return self.decoders[-1]

    async def stop(self) -> None:
        """Do nothing: what was forked has ended."""

    def parts(self, name: str) -> Sequence[Process]:
        """Return the processes of "worker" or of "decoders", else all of them."""
        parts: dict[str, Sequence[Process]] = {"worker": self.workers, "decoders": self.decoders}
        return parts.get(name, [*self.workers, *self.decoders])


T = TypeVar("T")
MODEL = "resnet18"
IMAGE = bytes(50_000)
"""Body of an image; decoders here do not read it."""
_SCOPE = {"method": "POST", "path": "/", "headers": (), "client": ("127.0.0.1", 1)}


class Outcome(NamedTuple):
    """Result of a request ("OK" or an error's code), time of sending and of the answer (`clock.monotonic()`)."""

    code: str
    sent_s: float
    came_s: float

    @property
    def seconds(self) -> float:
        return self.came_s - self.sent_s


class _Call(Call[Answer]):
    def __init__(self, context: RequestContext, model: str, timeout_s: float, priority: int) -> None:
        self.context, self.model, self.version = context, model, ""
        self.timeout_s, self.priority = timeout_s, priority

    def terms(self, settings: Settings) -> Terms:
        return Terms(self.context.started_s + self.timeout_s, self.priority, self.context.recorder)

    async def read(self, lease: Any, limit: Any) -> None:
        lease.take(len(IMAGE))

    async def prepare(self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Any) -> Any:
        return lambda: computed(ingress, served, [IMAGE], terms, options=OPTIONS, finish=lambda *_: None)

    async def watched(self, run: Callable[[], Awaitable[T]], on_leave: Callable[[], None]) -> T:
        return await run()


OPTIONS = Options()


class VirtualService:
    """Client of a service. `outcomes`: of all requests, in the order of the answers."""

    def __init__(self, service: Service, processes: Processes) -> None:
        self.service, self.processes = service, processes
        self.ingress = Ingress(service.link, None)  # type: ignore[arg-type]
        self.outcomes: list[Outcome] = []

    async def ask(
        self, model: str = MODEL, *, timeout_s: float = 60.0, priority: int = 0, client: str = "127.0.0.1"
    ) -> Outcome:
        with RequestContext(self.service.link, dict(_SCOPE)) as context:
            context.caller = Caller(client, CallerLimits(priority=HIGHEST_PRIORITY))
            try:
                await self.ingress.answer(_Call(context, model, timeout_s, priority))
                code = "OK"
            except ServiceError as error:
                code = context.code = error.code
        outcome = Outcome(code, context.started_s, clock.monotonic())
        self.outcomes.append(outcome)
        return outcome

    async def pause(self, part: str, seconds: float) -> None:
        """Let a part stand still ("worker", "decoders", or "service": these and this loop); return when it goes on."""
        for process in self.processes.parts(part):
            process.pause(seconds)
        if part == "service":
            asyncio.get_running_loop().stand_still(seconds)  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(seconds)

    def counted(self, name: str, **labels: str) -> float:
        families = [*self.service.metrics.registry.collect()]
        assert name.removesuffix("_total") in {family.name for family in families}, f"there is no {name}"
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@functools.cache
def _opened(models: tuple[str, ...], folder: str) -> tuple[Settings, Sequence[Any], Any]:
    given: dict[str, Any] = {
        "models": ",".join(models),
        "device": "null",
        "weights": "random",
        "null": "fail=999999999",  # The device looks at its images, so that they are decoded.
        "cache_dir": folder,
        "decoders": 2,
    }
    settings = Settings(**given)
    return settings, Opening().models(settings), chosen(settings)


@contextlib.asynccontextmanager
async def serving(
    folder: Any, *, decode_s: float, batch_s: Mapping[int, float], models: Sequence[str] = (MODEL,), **settings: Any
) -> AsyncIterator[VirtualService]:
    """Start a service. `decode_s`: time of an image on each of two decoders; `batch_s`: time by batch size."""
    processes = Processes(lambda _: decode_s, lambda run: batch_s[run.batch_size], batch_s)
    base, opened, choice = _opened(tuple(models), str(folder))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fleet_process, "spawn", processes.spawn)
        patched.setattr(decoding_pool, "ForkServer", lambda begin: processes)
        settings["batch_sizes"] = ",".join(map(str, batch_s))
        service = Service(base.model_copy(update=settings), opened, None, choice)
        await service.start()
        virtual = VirtualService(service, processes)
        try:
            yield virtual
        finally:
            assert service.images_under_way() == 0
            await virtual.ingress.close()
            await service.stop()
