"""Owner's end of the link: admission, and the way of each item from its slot to its one reply.

    reserve ─► submit: a slot, filled ─► queue, worker (app.fleet.dispatcher) ─► reply

Owns: every reason to refuse a well-formed request, its count and its message; the ways into a slot, which is the
network's input of one item; the items in flight. Each item gets exactly one reply, also when its client leaves or its
deadline passes. Must not know a transport. Decoder processes parse images; this process reads headers only: to count a
client's pixels, to pass a file to a device that decodes, or if the device reads no pixels.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import numpy as np
from prometheus_client import Counter

from app import clock
from app.decoder.messages import Kind
from app.decoding.pool import Decoders
from app.decoding.waiting import DecodeQueueFullError, DecodeTooLateError, Outcome, PendingImage
from app.errors import ServiceError, internal_error, invalid_request, shutting_down
from app.fleet.fleet import Fleet
from app.fleet.submission import ModelPool, Submission
from app.images.header import ImageError, plain_header, write_file
from app.link import (
    INLINE_BYTES,
    Content,
    Encoded,
    Frame,
    Link,
    Regions,
    Reply,
    Room,
    ServedModel,
    Tables,
    TensorRow,
    Terms,
    image_refusal,
    measured,
    too_late,
)
from app.processes.arena import Arena
from app.processes.channel import to_packet
from app.scheduling.queue import (
    ENDED,
    FILLING,
    PRIORITY_WORTH_S,
    QUEUED,
    DeadlineUnreachableError,
    NeverRoomError,
    QueueFullError,
    Reservation,
    rank_s,
)
from app.scheduling.scheduler import CHECK_STANDS_S
from models import Options, PixelModel, Placement, TensorModel, TensorOptions

log = logging.getLogger("anychip.service")

_MOST_SIZES = 4096
"""Most image sizes kept for a model: cameras produce few sizes."""

Filled = Callable[[Submission, ServiceError | None], None]
"""Callback, once for each submission: it has its placement, or there is an error. No process writes to the slot any
more."""


class Filling:
    """Writer of contents into the slots of a service's models."""

    def __init__(
        self, arena: Arena, max_image_pixels: int, decoders: Decoders | None, filled: Filled, *, reads_pixels: bool
    ) -> None:
        """Fill slots of `arena`. `decoders`: None if nothing is to be decoded. `reads_pixels`: False for the null
        device, which looks at no pixels.
        """
        self._arena, self._filled, self._reads_pixels = arena, filled, reads_pixels
        self._decoders = decoders if reads_pixels else None
        self._max_image_pixels = max_image_pixels
        # By the model's number, with the object that it was for: after a load that is another.
        self._placements: dict[int, tuple[PixelModel, dict[tuple[int, int], Placement | None]]] = {}

    def wait_s(self, pool: ModelPool, terms: Terms, now_s: float, images: int) -> float | None:
        """Return the seconds that the last of `images` new images will wait for a decoder; None while unknown."""
        if self._decoders is None or pool.passes_files or not isinstance(pool.model, PixelModel):
            return 0.0
        return self._decoders.queue.wait_s(pool.index, terms.priority * PRIORITY_WORTH_S, terms.client, now_s, images)

    def fill(self, items: Sequence[Submission], content: Content, needed_s: float = math.inf) -> None:
        """Fill the slots of items: one, or as many as there are regions. `needed_s`: a later fill is too late."""
        item = items[0]
        try:
            if isinstance(content, (bytes, bytearray, memoryview)):
                self._image(item, content, needed_s)
            elif isinstance(content, TensorRow):
                self._pack(item, content)
            elif isinstance(content, Frame) and (content.placed or not self._reads_pixels):
                if self._reads_pixels:
                    pixels = np.ascontiguousarray(content.pixels)
                    self._arena.slot(item.pool.index, item.slot)[:] = pixels.reshape(-1).view(np.uint8)
                self._placed(item, Placement(content.width, content.height))
            elif isinstance(content, Frame):
                data = content.pixels.tobytes()
                self._decode(items, data, Kind.PIXELS, content.width, content.height, needed_s=needed_s)
            else:
                self._decode_regions(items, content, needed_s)
        except ServiceError as error:
            for each in items:
                self._filled(each, error)
        except Exception:
            log.exception("a slot could not be filled")
            for each in items:
                self._filled(each, internal_error())

    def drop(self, item: Submission) -> None:
        """Stop decoding for an item that nobody waits for any more."""
        if item.image is not None and self._decoders is not None:
            self._decoders.drop(item.image)

    def _image(self, item: Submission, image: Encoded, needed_s: float) -> None:
        lease = item.terms.client_lease
        if self._decoders is None:
            self._placed(item, Placement(*measured(image, lease, self._max_image_pixels)))
            return
        if lease is not None and lease.counts_pixels:  # Else no header is read for it.
            measured(image, lease, self._max_image_pixels)
        if not (item.pool.passes_files and self._passed(item, image)):
            self._decode((item,), image, Kind.ENCODED, needed_s=needed_s)

    def _placed(self, item: Submission, placement: Placement) -> None:
        item.placement = placement
        self._filled(item, None)

    def _passed(self, item: Submission, image: Encoded) -> bool:
        """Put the file itself into the slot, if a device decodes it just as a decoder would; else return False.

        A decoder answers for all other files, broken ones included. A file that does not fit is not read; the slot
        bounds the cost of the rest.
        """
        model, slot = item.pool.model, self._arena.slot(item.pool.index, item.slot)
        assert isinstance(model, PixelModel)
        data = memoryview(image)
        plain = plain_header(data, len(slot))
        if plain is None:
            return False
        header, first_scan = plain
        placement = self._placement_by_device(item.pool.index, model, (header.width, header.height))
        if placement is None or header.width * header.height > self._max_image_pixels:
            return False
        write_file(slot, data, header, first_scan)
        item.refill = lambda item: self._decode((item,), image, Kind.ENCODED, again=True)
        self._placed(item, placement)
        return True

    def _placement_by_device(self, pool: int, model: PixelModel, size: tuple[int, int]) -> Placement | None:
        """Return the placement of an image of this size, or None if the device cannot decode it as a decoder would."""
        of, placements = self._placements.get(pool, (None, {}))
        if of is not model or len(placements) > _MOST_SIZES:
            placements = {}
            self._placements[pool] = model, placements
        if size not in placements:
            possible = model.geometry(*size) is not None and model.decode_size(*size) == size
            placements[size] = model.placement(*size) if possible else None
        return placements[size]

    def _decode(
        self,
        items: Sequence[Submission],
        image: Encoded,
        kind: Kind,
        width: int = 0,
        height: int = 0,
        *,
        tail: bytes = b"",
        needed_s: float = math.inf,
        again: bool = False,
    ) -> None:
        """Let a decoder process decode the image for its items, in the queue's order; `again`: it returns."""
        assert self._decoders is not None
        first = items[0]
        pending = PendingImage(
            first.pool.index,
            rank_s(first.begun_s, items[-1].position, self._decoders.queue.seconds_an_image, first.terms.priority),
            image,
            self._decoded,
            kind,
            first.slot,
            width,
            height,
            tail,
            needed_s,
            wanted=len(items),
            items=items,
        )
        for item in items:
            item.image = pending
        self._decoders.decode(pending, client=first.terms.client, again=again)

    def _decode_regions(self, items: Sequence[Submission], content: Regions, needed_s: float) -> None:
        model = items[0].pool.model
        assert isinstance(model, PixelModel)
        for item, region in zip(items, content.regions, strict=True):
            item.placement = model.placement(*region.size)
        if self._decoders is None:
            for item in items:
                self._filled(item, None)
            return
        tail = to_packet([(item.slot, region) for item, region in zip(items, content.regions, strict=True)])
        self._decode(items, content.image, Kind.REGIONS, tail=tail, needed_s=needed_s)

    def _decoded(self, image: PendingImage, outcome: Outcome) -> None:
        """Continue with the items of an image that no decoder has any more. An error concerns those who still wait."""
        items: Sequence[Submission] = image.items
        error = None
        if not isinstance(outcome, Placement) and not all(item.status is ENDED for item in items):
            error = client_error(items[0].pool, outcome)
        for item in items:
            item.image = None
            if isinstance(outcome, Placement) and image.kind is not Kind.REGIONS:
                item.placement = outcome
            self._filled(item, error)

    def _pack(self, item: Submission, row: TensorRow) -> None:
        model, target = item.pool.model, self._arena.slot(item.pool.index, item.slot)
        assert isinstance(model, TensorModel)
        if target.nbytes <= INLINE_BYTES:
            model.pack(row.inputs, item.position, target)
            self._filled(item, None)
            return
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, model.pack, row.inputs, item.position, target).add_done_callback(
            partial(self._packed, item)
        )

    def _packed(self, item: Submission, packing: asyncio.Future[None]) -> None:
        if packing.cancelled() or (error := packing.exception()) is not None:
            log.error("a slot could not be filled", exc_info=None if packing.cancelled() else error)
            self._filled(item, internal_error())
        else:
            self._filled(item, None)


def client_error(pool: ModelPool, error: Exception) -> ServiceError:
    """Return the service's error for a decoding error; count a full queue or a late image."""
    if isinstance(error, DecodeQueueFullError):
        pool.metrics.rejected["decode_queue_full"].inc()
        return ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=1)
    if isinstance(error, DecodeTooLateError):
        pool.metrics.expired["decode"].inc()
        return too_late()
    if isinstance(error, ImageError):
        return image_refusal(error)
    log.error("an image could not be decoded: %s", error)
    return internal_error()


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
        self._checked: asyncio.Future[None] = self.loop.create_future()
        self._checked.set_result(None)

    def check(self, served: ServedModel, terms: Terms) -> Awaitable[None]:  # noqa: D102
        if self.refusing:
            raise shutting_down()
        now_s, room = clock.monotonic(), self._asked(served, terms, 1)
        ready_s = self._filling.wait_s(room.served, terms, now_s, 1)
        try:
            room.expected_s = self._fleet.scheduler.check(room, now_s, ready_s)
        except (QueueFullError, DeadlineUnreachableError) as error:
            self._refuse(served, error, 1)
        room.admitted_s, terms.room = now_s, room
        return self._checked

    def reserve(self, served: ServedModel, count: int, terms: Terms) -> Room:  # noqa: D102
        now_s = clock.monotonic()
        if now_s >= terms.deadline_s:
            served.metrics.expired["upload"].inc(count)
            raise ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the request had arrived")
        room, terms.room = terms.room, None
        # What was asked a moment ago is not asked again; an item whose model is gone by then is refused.
        if not (isinstance(room, _OwnRoom) and room.stands(served, count, terms, now_s)):
            room = self._asked(served, terms, count)
        if terms.client_lease is not None:
            terms.client_lease.admit_images(count)
        try:
            self._fleet.scheduler.reserve(room, now_s, partial(self._filling.wait_s, room.served, terms, now_s))
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
        if pool.shown.unloaded or not fleet.scheduler.serving[name]:
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
        self._filling.fill(items, content, terms.deadline_s - room.batch_s)

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

    def stands(self, served: ServedModel, count: int, terms: Terms, now_s: float) -> bool:
        """Return True if the check of this room is as good as another one now: for the same, and a moment old."""
        same = served is self.served and count == self.images
        same = same and terms.deadline_s == self.deadline_s and terms.priority == self.priority
        return same and now_s < self.admitted_s + CHECK_STANDS_S

    def __exit__(self, *_: object) -> None:
        link = self._submissions
        link.deadlines.discard(self)
        for token in self.tokens:
            if token in link._under_way:
                link.cancel(token)
        self.served.images -= self.images
        for watcher in self.served.watchers:
            watcher.set()
        link._fleet.scheduler.release(self)


class _Deadlines:
    """Deadlines of rooms by ticks; one timer, for the first tick, which stays when its rooms have left: most do."""

    def __init__(self, submissions: Submissions) -> None:
        self._submissions = submissions
        # By the tick at whose end they are due, in the order in which they came: sets have another in each process.
        self._due: dict[int, dict[_OwnRoom, None]] = {}
        self._first = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, room: _OwnRoom, now_s: float) -> None:
        self._due.setdefault(room.tick, {})[room] = None
        if self._timer is None or room.tick < self._first:
            self._arm(room.tick, now_s)

    def discard(self, room: _OwnRoom) -> None:
        rooms = self._due.get(room.tick, {})
        if rooms.pop(room, room) is None and not rooms:
            del self._due[room.tick]

    def _arm(self, tick: int, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._first = tick
        self._timer = self._submissions.loop.call_later((tick + 1) * _TICK_S - now_s, self._expire)

    def _expire(self) -> None:
        now_s, self._timer = clock.monotonic(), None
        last = max(self._first, int(now_s / _TICK_S) - 1)
        rooms = [room for tick in sorted(self._due) if tick <= last for room in self._due.pop(tick)]
        if self._due:
            self._arm(min(self._due), now_s)
        for room in rooms:
            self._submissions.expire(room.tokens)


_TICK_S = 0.004
