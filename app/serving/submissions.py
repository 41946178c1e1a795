"""Owner's end of the link: admission, and the way of each item from its slot to its one reply.

    reserve ─► submit: a slot, filled (app.serving.filling) ─► queue, worker (app.fleet.dispatcher) ─► reply

Owns: every reason to refuse a well-formed request, its count and its message; the items in flight. Each item gets
exactly one reply, also when its client leaves or its deadline passes. Must not know a transport.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

from prometheus_client import Counter

from app import clock
from app.decoding.pool import Decoders
from app.errors import ServiceError, invalid_request
from app.fleet.fleet import Fleet
from app.fleet.submission import ModelPool, Submission
from app.link import Content, Link, Reply, Room, ServedModel, Tables, Terms, too_late
from app.scheduling.queue import (
    ENDED,
    FILLING,
    QUEUED,
    DeadlineUnreachableError,
    NeverRoomError,
    QueueFullError,
    Reservation,
)
from app.scheduling.scheduler import CHECK_STANDS_S
from app.serving.filling import Filling
from models import Options, TensorOptions


class Submissions(Link):
    """Link of one ingress, in the owner's event loop."""

    def __init__(self, tables: Tables, fleet: Fleet, decoders: Decoders | None, *, reads_pixels: bool) -> None:
        """Make a link. `decoders`: None if nothing is to be decoded; `reads_pixels`: the device looks at pixels."""
        super().__init__(tables)
        self._fleet = fleet
        self.loop = asyncio.get_running_loop()
        self._filling = Filling(
            fleet.arena, tables.settings.max_image_pixels, decoders, self._filled, reads_pixels=reads_pixels
        )
        self.refusing = False
        """True when the service is about to stop, and takes no requests any more."""
        self._under_way: dict[int, Submission] = {}
        """Items that have no reply yet, by token."""
        self.deadlines = _Deadlines(self)

    def connect(self, on_reply: Callable[[int, Reply], None]) -> None:  # noqa: D102
        self._on_reply = on_reply

    async def check(self, served: ServedModel, terms: Terms) -> None:  # noqa: D102
        self.check_now(served, terms)

    def check_now(self, served: ServedModel, terms: Terms) -> None:
        """Check admission at once, as `check` does."""
        if self.refusing:
            raise ServiceError("DRAINING", "the service is shutting down", retry_after_s=5)
        now_s, room = clock.monotonic(), self._asked(served, terms, 1)
        ready_s = self._filling.wait_s(room.served, terms, 1)
        try:
            room.expected_s = self._fleet.scheduler.check(room, now_s, ready_s)
        except (QueueFullError, DeadlineUnreachableError) as error:
            self._refuse(served, error, 1)
        room.admitted_s, terms.room = now_s, room

    def reserve(self, served: ServedModel, count: int, terms: Terms) -> Room:  # noqa: D102
        now_s = clock.monotonic()
        if now_s >= terms.deadline_s:
            served.metrics.expired["upload"].inc(count)
            raise ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the request had arrived")
        room, terms.room = terms.room, None
        # What was asked a moment ago is not asked again; an item whose model is gone by then is refused.
        if not (isinstance(room, _OwnRoom) and room.stands(served, count, now_s)):
            room = self._asked(served, terms, count)
        if terms.client_lease is not None:
            terms.client_lease.admit_images(count)
        try:
            self._fleet.scheduler.reserve(room, now_s, partial(self._filling.wait_s, room.served, terms))
        except NeverRoomError as error:
            raise invalid_request(f"{error}; send fewer at a time") from None
        except (QueueFullError, DeadlineUnreachableError) as error:
            self._refuse(served, error, count)
        room.served.images += count
        self.deadlines.add(room, now_s)
        return room

    def _asked(self, served: ServedModel, terms: Terms, count: int) -> _OwnRoom:
        """Return room that is not reserved yet, and ask for a model that has no worker. Raises NOT_READY."""
        fleet, name = self._fleet, served.model.name
        pool = fleet.models[name]
        if pool.shown.unloaded or not fleet.scheduler.serves(name):
            fleet.readiness.refuse_unless_served(name)
        if name in fleet.residents.names:
            fleet.residents.ask(name, terms.deadline_s, terms.client)
        return _OwnRoom(self, pool, terms, count)

    def submit(  # noqa: D102
        self, room: Room, tokens: Sequence[int], content: Content, options: Options | TensorOptions, position: int
    ) -> None:
        assert isinstance(room, _OwnRoom)
        pool, terms, now_s = room.served, room.terms, clock.monotonic()
        items = []
        for place, token in enumerate(tokens, position):
            item = Submission(room, place, token, pool, pool.slots.take(), options, terms, self._ended, now_s)
            items.append(item)
            self._under_way[token] = item
        room.tokens += tokens
        self._filling.fill(items, content, terms.deadline_s - self._fleet.scheduler.batch_s(pool.model.name, now_s))

    def cancel(self, token: int) -> None:  # noqa: D102
        item = self._under_way.get(token)
        if item is not None:
            counts = item.pool.metrics.cancelled if item.terms.recorder.abandoned else None
            self._withdraw(item, ServiceError("INTERNAL", "the request was cancelled"), counts)

    def expire(self, tokens: Sequence[int]) -> None:
        """Answer those of the items that have no reply at their deadline."""
        for token in tokens:
            if (item := self._under_way.get(token)) is not None:
                error = self._fleet.residents.late(item.pool.model.name) or too_late()
                self._withdraw(item, error, item.pool.metrics.expired)

    def end(self, room: _OwnRoom) -> None:
        """End a room whose request has ended: cancel its unanswered items, and give the room back."""
        self.deadlines.discard(room)
        for token in room.tokens:
            if token in self._under_way:
                self.cancel(token)
        room.served.answered(room.images)
        self._fleet.scheduler.release(room)

    def _withdraw(self, item: Submission, error: ServiceError, counts: Mapping[str, Counter] | None) -> None:
        """End an item early. If a process still uses its slot, the slot comes back later."""
        status = item.status
        if counts is not None:
            counts[status.value].inc()
        if status is QUEUED:
            self._fleet.dispatcher.discard(item, error)
            return
        item.end(error)
        if status is FILLING:
            self._filling.drop(item)

    def _filled(self, item: Submission, error: ServiceError | None) -> None:
        """Continue with an item to whose slot no process writes any more."""
        if item.status is ENDED:
            item.give_slot()
        elif error is not None:
            item.end(error)
            item.give_slot()
        elif (now_s := clock.monotonic()) >= item.terms.deadline_s:
            self._withdraw(item, too_late(), item.pool.metrics.expired)
            item.give_slot()
        else:
            self._fleet.dispatcher.enqueue(item, now_s)

    def _ended(self, item: Submission, reply: Reply) -> None:
        del self._under_way[item.token]
        trace = item.terms.recorder.trace
        if trace is not None and isinstance(reply, ServiceError):
            begun = [("decode", item.begun_s), ("queue", item.queued_s)]
            trace.stages(begun if item.queued_s else begun[:1], clock.monotonic(), item.position, None)
        self._on_reply(item.token, reply)

    def _refuse(self, served: ServedModel, error: Exception, count: int) -> NoReturn:
        retry_after_s = max(1, math.ceil(min(self._fleet.scheduler.drain_time_s(served.model.name), 60.0)))
        if isinstance(error, QueueFullError):
            served.metrics.rejected["queue_full"].inc(count)
            raise ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=retry_after_s) from None
        served.metrics.rejected["deadline"].inc(count)
        message = f"{error}, and the deadline is before that; try again"
        raise ServiceError("DEADLINE_UNREACHABLE", message, retry_after_s=retry_after_s) from None


class _OwnRoom(Reservation, Room):
    """Room that is also the scheduler's reservation."""

    __slots__ = ("_submissions", "served", "terms", "tick", "tokens")
    served: ModelPool

    def __init__(self, submissions: Submissions, pool: ModelPool, terms: Terms, count: int) -> None:
        Reservation.__init__(self, pool.model.name, count, terms.priority, terms.deadline_s, terms.client)
        self.served, self.terms, self._submissions = pool, terms, submissions
        self.tokens: list[int] = []
        self.tick = int(self.deadline_s / _TICK_S)

    def stands(self, served: ServedModel, count: int, now_s: float) -> bool:
        """Return True if the check of this room is as good as another one now: for the same, and a moment old."""
        terms = self.terms
        same = served is self.served and count == self.images
        same = same and terms.deadline_s == self.deadline_s and terms.priority == self.priority
        return same and now_s < self.admitted_s + CHECK_STANDS_S

    def __exit__(self, *_: object) -> None:
        self._submissions.end(self)


class _Deadlines:
    """Timers of rooms: one for all deadlines in the same milliseconds; each ends its rooms' items."""

    def __init__(self, submissions: Submissions) -> None:
        self._submissions = submissions
        # By the tick at whose end they are due, in the order in which they came: sets have another in each process.
        self._due: dict[int, tuple[asyncio.TimerHandle, dict[_OwnRoom, None]]] = {}

    def add(self, room: _OwnRoom, now_s: float) -> None:
        """Add an admitted room."""
        due = self._due.get(room.tick)
        if due is None:
            in_s = (room.tick + 1) * _TICK_S - now_s
            timer = self._submissions.loop.call_later(in_s, self._expire, room.tick)
            due = self._due[room.tick] = timer, {}
        due[1][room] = None

    def discard(self, room: _OwnRoom) -> None:
        """Remove a room that is given back."""
        due = self._due.get(room.tick)
        if due is not None:
            timer, rooms = due
            rooms.pop(room, None)
            if not rooms:
                timer.cancel()
                del self._due[room.tick]

    def _expire(self, tick: int) -> None:
        for room in self._due.pop(tick)[1]:
            self._submissions.expire(room.tokens)


_TICK_S = 0.004
