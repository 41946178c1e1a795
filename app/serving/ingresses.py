"""Ingresses in processes of their own, seen by the owner (--ingresses).

    a connection that was accepted ─► the ingress with the fewest ─► what it asks over the link ─► Submissions
    an ingress that ends or hangs ─► its connections, rooms and items end ─► another one

A record that names a room, token or connection that its ingress does not have ends the process that sent it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from anychip_base.interpreter import NO_THREADS, bare_environment, module_path
from app import clock, logs
from app.config import Settings
from app.errors import ServiceError
from app.fleet.fleet import Fleet
from app.fleet.process import SpawnedChild, pack, spawn
from app.fleet.submission import ModelPool
from app.link import Reply, Result, Room, Terms
from app.link_messages import (
    INLINE_BYTES,
    Ask,
    Asked,
    Cancel,
    Closed,
    CounterDeltas,
    Draining,
    EncodedAt,
    End,
    Here,
    IngressBegin,
    IngressReady,
    ItemComputed,
    ItemFailed,
    Leave,
    Look,
    NewConnection,
    NewModels,
    NewShares,
    Reserve,
    SentError,
    Serves,
    Submit,
    ToOwner,
    Tunnelled,
    Uncongested,
    found,
)
from app.observability.counter_deltas import add
from app.observability.metrics import Metrics
from app.processes.arena import open_blocks, sealed_memory
from app.processes.channel import DescriptorLostError
from app.processes.packing import write_packed
from app.processes.place import Cause, ChildStatus, Supervisor
from app.scheduling.queue import DeadlineUnreachableError, QueueFullError, Reservation
from app.serving.administration import ServiceAdministration
from app.serving.submissions import Submissions
from app.worker.main import Begin, in_bytes
from backends import host
from models import Model

log = logging.getLogger("anychip.service")

_PROGRAM = "app.ingress_main:main"
_ANSWER_S, _START_S = 5.0, 30.0
"""Silence after which an ingress is ended: one that is ready, and one that starts."""
_TICK_S = 0.05
_END_S = 7.0
_UNCONGESTED_SHARE, _UNCONGESTED_S = 0.5, 0.2
"""Share of a queue and seconds to an answer: of an uncongested model so much is free, and it answers so soon."""

OWNERS_SHARE = 0.5
"""Owner's share of the bytes that requests may hold. The ingresses divide the rest."""
_BYTES_PER_S = 16 << 20
"""Most bytes an ingress may say: a request takes about a thousand, and an ingress answers some thousands a second."""
_ROOMS, _ROOMS_EACH = 16_384, 4
"""Most rooms of an ingress at once, and for each connection that it may have: two stages take two."""
_NAME = 256
"""Most characters of a client's or a request's name. Those of keys, addresses and ids have 128 at most."""


def count_of(settings: Settings, *, traced: bool) -> int:
    """Return the number of ingresses. `auto` means none if each client's limits are counted or requests are traced: the
    owner would read most of them again.
    """
    if settings.ingresses != "auto":
        return settings.ingresses
    cores = host.core_count()
    return 0 if cores <= _FEW_CORES or settings.client_limits or traced else min(_MOST, cores // _CORES_EACH)


_FEW_CORES, _CORES_EACH, _MOST = 4, 5, 4


@dataclass(slots=True)
class _IngressRoom:
    """Room of an ingress; if it was refused, `room` is None. `left`: tokens that may still come."""

    room: Room | None
    refusal: ServiceError | None
    terms: Terms
    left: int
    request_id: str


@dataclass(eq=False, slots=True)
class _Connection:
    """Client's connection at an ingress. It counts until the ingress, and a server that serves it too, have let go."""

    address: str
    give: Callable[[], None]
    holders: int = 1

    def tunnel(self) -> None:
        """Let the owner serve it, too. Raises ValueError the second time."""
        if self.holders != 1:
            raise ValueError("a connection is tunnelled twice")
        self.holders = 2

    def end(self) -> None:
        self.holders -= 1
        if not self.holders:
            self.give()


class _RemoteIngress(SpawnedChild):
    """One ingress process. `connections`: by number, at most `room`."""

    end_s = 0.0

    def __init__(self, of: Ingresses, number: int) -> None:
        super().__init__(f"ingress {number}")
        self.start_s = _START_S
        self._of, self._link = of, of.link()
        self._link.connect(self._replied)
        self._rooms: dict[int, _IngressRoom] = {}
        self._tokens: dict[int, int] = {}  # The index of its model.
        self.connections: dict[int, _Connection] = {}
        self.room = 0
        self._memory = memoryview(b"")
        self._step = len(of.forms)
        self._numbers = {id(form.model): form.index for form in of.forms}
        self._objects = {form.index: form.model for form in of.forms}
        self._latest = {form.index: form.index for form in of.forms}
        self._serves = dict(self._latest)
        self._uncongested: tuple[int, ...] = ()
        self._traffic: dict[str, Mapping[str, float]] = {}
        self._draining = False
        self._unsent = -1  # Descriptor of the models that it is sent once it has begun; -1: none.

    async def begin(self) -> None:
        forms, settings = [form.model for form in self._of.forms], self._of.begin.settings
        self._unsent = await pack(forms, "anychip-models")
        style = settings["log_level"], settings["log_format"]
        kept = ("HOME", "PATH", "TZ") if not settings["trace_endpoint"] else os.environ
        environment = bare_environment() | {name: os.environ[name] for name in kept if name in os.environ} | NO_THREADS
        begin = Begin(self.name, in_bytes(environment), style, module_path(), bare=True, program=_PROGRAM)
        self.connect(*await spawn(begin, forks=True), ToOwner, self._received, most_bytes_per_s=_BYTES_PER_S)

    def disconnect(self) -> None:
        super().disconnect()
        self._memory = memoryview(b"")  # Else what its blocks take is only free once this is collected as garbage.
        if self._unsent >= 0:
            os.close(self._unsent)
            self._unsent = -1
        for room in [each.room for each in self._rooms.values() if each.room is not None]:
            room.__exit__()
        self._rooms.clear()
        connections, self.connections = self.connections, {}
        for each in connections.values():
            each.end()

    def answer_s(self) -> float:
        return _ANSWER_S

    def look(self) -> None:
        self.talk.say(Look())

    def gone(self) -> None:
        if self.cause is not Cause.STOPPED:
            self._of.metrics.ingress_restarts.inc()

    def tell(self, uncongested: tuple[int, ...]) -> None:
        """Send it what has changed: uncongested models, traffic shares, draining, and models."""
        administration, say = self._of.administration, self.talk.say
        if uncongested != self._uncongested:
            self._uncongested = uncongested
            say(Uncongested(uncongested))
        if administration.traffic != self._traffic:
            self._traffic = {name: dict(shares) for name, shares in administration.traffic.items()}
            say(NewShares(self._traffic))
        if administration.draining and not self._draining:
            self._draining = True
            say(Draining())
        for form in self._of.forms:
            number = self._number(form.model, form.index)
            if number != self._serves[form.index]:
                self._serves[form.index] = number
                say(Serves({form.index: number}))

    def _received(self, message: ToOwner) -> None:
        self.received_s = clock.monotonic()
        match message:
            case Submit():
                self._submit(message)
            case Leave():
                room = self._rooms.pop(message.room).room
                if room is not None:
                    room.__exit__()
            case Reserve():
                self._reserve(message)
            case Ask():
                refusal = None
                try:
                    self._link.check(self._form(message.model), _terms(message))
                except ServiceError as error:
                    refusal = SentError.of(error)
                self.talk.say(Asked(message.token, refusal))
            case Cancel():
                self._rooms[message.room].terms.recorder.abandoned |= message.abandoned
                self._link.cancel(message.token)
            case Closed():
                self.connections.pop(message.connection).end()
            case Tunnelled():
                self._tunnel(message)
            case CounterDeltas():
                self._of.counted(message.content)
            case IngressReady():
                self._memory, self.room = open_blocks(self.talk.take_descriptor()), message.connections
                self.has_served = True
                self.move(ChildStatus.READY)
            case Here():
                if self._unsent >= 0:
                    models, self._unsent = self._unsent, -1
                    self.talk.say(self._of.begin, descriptor=models)

    def _tunnel(self, message: Tunnelled) -> None:
        connection = self.connections[message.connection]
        connection.tunnel()
        try:
            end = socket.socket(fileno=self.talk.take_descriptor())
        except DescriptorLostError:  # Its client hears that it has ended, as the other end is closed.
            connection.end()
        else:
            self._of.tunnel(end, connection.address, message.encrypted, connection.end)

    def _form(self, index: int) -> ModelPool:
        if not 0 <= index < self._step:
            raise ValueError(f"there is no model {index}")
        return self._of.forms[index]

    def _reserve(self, message: Reserve) -> None:
        terms, form = _terms(message), self._form(message.model)
        if message.room in self._rooms or message.count < 1 or len(self._rooms) >= self._of.most_rooms:
            raise ValueError(f"room {message.room} for {message.count} cannot be, beside {len(self._rooms)}")
        if len(message.request_id) > _NAME:
            raise ValueError("a request's name is too long")
        logs.request_id.set(message.request_id)
        room = refusal = None
        try:
            if self._link.refusing:  # For an uncongested model the ingress has not asked.
                self._link.check(form, terms)
            room = self._link.reserve(form, message.count, terms)
        except ServiceError as error:
            refusal = error
        self._rooms[message.room] = _IngressRoom(room, refusal, terms, message.count, message.request_id)

    def _submit(self, message: Submit) -> None:
        held, tokens = self._rooms[message.room], message.tokens
        held.left -= len(tokens)
        if held.left < 0 or message.position < 0 or len({*tokens} - self._tokens.keys()) < len(tokens):
            raise ValueError(f"room {message.room} has no place for {tokens}")
        if held.room is None:
            assert held.refusal is not None
            for token in tokens:
                self.talk.say(ItemFailed(token, SentError.of(held.refusal)))
            return
        options = message.options or message.tensor_options
        content = found(message.content, self._memory)
        wanted = len(message.content.regions) if isinstance(message.content, EncodedAt) else 0
        if options is None or len(tokens) != max(1, wanted):
            raise ValueError(f"{len(tokens)} tokens came for {max(1, wanted)} items")
        logs.request_id.set(held.request_id)
        for token in tokens:
            self._tokens[token] = held.room.served.index
        self._link.submit(held.room, tokens, content, options, message.position)

    def _replied(self, token: int, reply: Reply) -> None:
        index = self._tokens.pop(token)
        if not isinstance(reply, Result):
            self.talk.say(ItemFailed(token, SentError.of(reply)))
            return
        arrays, batch = reply.arrays, reply.batch
        parts, descriptor = [each.tobytes() for each in arrays or ()], -1
        if (size := sum(map(len, parts))) > INLINE_BYTES:
            descriptor = sealed_memory("anychip-result", size)
            with open(descriptor, "wb", closefd=False) as file:
                file.writelines(parts)
            parts.clear()
        data = b"".join(parts)
        self.talk.say(
            ItemComputed(
                token,
                None if arrays is None else tuple([(each.dtype.str, each.shape) for each in arrays]),
                data,
                self._number(reply.model, index),
                reply.computed_by,
                reply.placement,
                reply.begun_s,
                reply.queued_s,
                reply.infer_s,
                None if batch is None else (f"{batch.trace_id:032x}", f"{batch.span_id:016x}", int(batch.trace_flags)),
            ),
            len(data),
            descriptor,
        )

    def _number(self, model: Model, index: int) -> int:
        number = self._numbers.get(id(model))
        if number is None:
            number = self._latest[index] = self._latest[index] + self._step
            self._numbers[id(model)], self._objects[number] = number, model
            left = self._objects.pop(number - 2 * self._step, None)
            self._numbers.pop(id(left), None)
            self.talk.say(NewModels({index: number}), descriptor=write_packed([model], "anychip-models"))
        return number


def _terms(message: Ask | Reserve) -> Terms:
    if not math.isfinite(message.deadline_s):
        raise ValueError("a deadline is a time")
    if len(message.client) > _NAME:
        raise ValueError("a client's name is too long")
    return Terms(message.deadline_s, message.priority, client=message.client)


class Ingresses:
    """All ingresses of one service; inside a running event loop. `forms`: all models that are served, by index."""

    def __init__(
        self,
        count: int,
        link: Callable[[], Submissions],
        fleet: Fleet,
        *,
        administration: ServiceAdministration,
        metrics: Metrics,
        begin: IngressBegin,
        tunnel: Callable[[socket.socket, str, bool, Callable[[], None]], None],
        names: Iterable[str] = (),
    ) -> None:
        """Prepare `count` ingresses. `link`: makes a link; `begin`: the first message to each; `tunnel`: serves a
        connection that no ingress can, with a socket's end, the client's address, whether it speaks TLS, and a callback
        for its end; `names`: allowed model labels beside models.
        """
        self.forms = [*fleet.models.values()]
        self.administration, self.tunnel = administration, tunnel
        self.link, self.begin, self.metrics = link, begin, metrics
        self._count, self._fleet = count, fleet
        self._names = frozenset(("", *fleet.models, *names))
        self.most_rooms = max(_ROOMS, _ROOMS_EACH * begin.settings.get("max_connections", 0))
        self._places: list[Supervisor[_RemoteIngress]] = []
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._connections = 0
        metrics.ingresses_up.set_function(lambda: len(self._ready))

    @property
    def _ready(self) -> list[_RemoteIngress]:
        return [each.child for each in self._places if each.child.is_ready]

    async def start(self) -> None:
        """Start all; return when each was ready once, or could not start. Until then connections are the owner's."""
        starts = (partial(_RemoteIngress, self, number) for number in range(self._count))
        self._places = [Supervisor(start, log, breaks=True) for start in starts]
        self._telling = self._loop.create_task(self._tell())
        await asyncio.wait([each.ready for each in self._places])

    def take(self, accepted: socket.socket, lost: Callable[[], None]) -> bool:
        """Give a connection to an ingress; `lost` is called at its end. Return False if no ingress can take it."""
        takes = [each for each in self._ready if len(each.connections) < each.room]
        if not takes or self._stopping:
            return False
        try:
            address = accepted.getpeername()
        except OSError:  # It has left already.
            address = ""
        received_s = clock.monotonic() - 2 * _RemoteIngress.look_s  # One that is silent may soon be killed.
        chosen = min(takes, key=lambda each: (each.received_s < received_s, len(each.connections)))
        self._connections += 1
        client = str(address[0]) if isinstance(address, tuple) else ""  # A Unix socket has no address.
        chosen.connections[self._connections] = _Connection(client, lost)
        chosen.talk.say(NewConnection(self._connections), descriptor=accepted.detach())
        return True

    def counted(self, content: bytes) -> None:
        """Add an ingress's counters to the metrics. Raises for values that cannot be."""
        models = self._fleet.models
        statistics = {name: pool.statistics for name, pool in models.items()}
        add(content, self.metrics, statistics, {"model": self._names})

    def end(self) -> None:
        """Let ingresses end: unanswered requests get DRAINING, new connections are the owner's. Idempotent."""
        if not self._stopping:
            self._stopping = True
            for each in self._places:
                each.close()
                if each.child.is_ready:
                    each.child.talk.say(End())

    async def stop(self, *, hurry: bool = False) -> None:
        """End every process, in a `hurry` at once. Idempotent."""
        self.end()
        await asyncio.gather(*(each.stop(0.0 if hurry else _END_S) for each in self._places))
        if self._places:
            self._telling.cancel()

    async def _tell(self) -> None:
        while True:
            numbers = (each.index for each in self.forms if self._is_uncongested(each))
            uncongested = () if self.administration.draining else tuple(numbers)
            for each in self._ready:
                each.tell(uncongested)
            await asyncio.sleep(_TICK_S)

    def _is_uncongested(self, form: ModelPool) -> bool:
        name, now_s = form.model.name, clock.monotonic()
        queue = self._fleet.scheduler.queues[name]
        if queue.depth + queue.reserved > _UNCONGESTED_SHARE * queue.limit:
            return False
        if not self._fleet.readiness.is_served(name):
            return False
        try:
            self._fleet.scheduler.check(Reservation(name, 1, 0, now_s + _UNCONGESTED_S), now_s)
        except (QueueFullError, DeadlineUnreachableError):
            return False
        return True
