"""The images of a model that wait for a worker, in the order in which they will run.

Owns: one model's queue, its bound and its order. Must not know workers, nor how long batches take. Times are in
seconds, the clock is a parameter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from app.scheduling.batching import Lateness

_STANDS_S = 0.001


class QueueFullError(Exception):
    """The model has as many images waiting as it may have."""


class NeverRoomError(Exception):
    """The images are more than may ever wait."""


class DeadlineUnreachableError(Exception):
    """The deadline would pass before the answer could be there; `expected_s` is when it could."""

    def __init__(self, expected_s: float) -> None:
        super().__init__(f"the answer would take {expected_s * 1e3:.0f} ms")
        self.expected_s = expected_s


@dataclass(slots=True)
class Checked:
    """The admission check made before the upload, at `at_s`, for one image; `expected_s`: as in Reservation."""

    model: str
    deadline_s: float
    priority: int
    at_s: float
    expected_s: float | None

    def stands(self, model: str, deadline_s: float, priority: int, now: float) -> bool:
        """Whether that check is still valid: its body had arrived already, so that no time passed (1 ms)."""
        same = deadline_s == self.deadline_s and priority == self.priority and model == self.model
        return same and now < self.at_s + _STANDS_S


@dataclass(eq=False, slots=True)
class Reservation:
    """Room in a model's queue for the images of one request: `left` of `images` are still on their way to it.

    `client`: whose request it is, "" where that is not known. The scheduler fills the rest when it lets the request in:
    `expected_s`: when the first of them was expected to be answered, in seconds from `admitted_s` on, lateness not
    included; None where the model had no worker, or where it was not known how long its images wait to be decoded.
    `interruptions`: of the model's work until then.
    `behind`: how many requests its client had under way; `first_s`: the rank of the first image that came into the
    queue; `alone`: nothing else of the model was under way.
    """

    model: str
    images: int
    priority: int
    deadline_s: float
    client: str = ""
    left: int = field(init=False, default=0)
    admitted_s: float = field(init=False, default=0.0)
    expected_s: float | None = field(init=False, default=None)
    interruptions: int = field(init=False, default=0)
    behind: int = field(init=False, default=0)
    first_s: float | None = field(init=False, default=None)
    alone: bool = field(init=False, default=False)


class ItemStatus(Enum):
    """Where an item is; the value is what metrics call that stage."""

    FILLING = "decode"
    """Its slot is being filled, for the first time or once more."""
    QUEUED = "queue"
    """It waits for a worker."""
    COMPUTING = "infer"
    """It has left the queue: a worker has it, or who took it out ends it at once."""
    ENDED = "ended"
    """Its reply is given. Who has its slot in hand (a decoder, a worker) gives it back when that is over."""


class Attempt(Enum):
    """Which time it is that an item is computed."""

    FIRST = 1
    AGAIN = 2
    """A batch with it was lost or failed."""
    ALONE = 3
    """It may have been the reason: it runs in a batch of its own, with nothing else on its worker."""


FILLING, QUEUED, COMPUTING, ENDED = ItemStatus
FIRST, AGAIN, ALONE = Attempt
"""In Python 3.11 each look-up of a member in its enumeration is a call, and an item's way has a dozen."""


@dataclass(eq=False, slots=True)
class Item:
    """One image of a request, at a position there; its owner's kind has more. `queued_s`: since when it waits for a
    worker, 0 before; `rank_s`: its order in the queue.
    """

    reservation: Reservation
    position: int
    status: ItemStatus = field(init=False, default=FILLING)
    attempt: Attempt = field(init=False, default=FIRST)
    queued_s: float = field(init=False, default=0.0)
    rank_s: float = field(init=False, default=0.0)


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Items sent to a worker together, padded to `size`, one of the model's batch sizes."""

    id: int
    worker: str
    model: str
    items: tuple[T, ...]
    size: int
    dispatched_s: float


@dataclass(frozen=True, slots=True)
class LostBatches(Generic[T]):
    """The batches that a lost worker never finished, in the order sent."""

    begun: tuple[Batch[T], ...]
    """Those that may have been running: one of them may be the reason for the loss."""
    waiting: tuple[Batch[T], ...]
    """Those that cannot have begun."""


@dataclass(slots=True)
class Queue(Generic[T]):
    """A model's images, reserved and waiting, the next one first."""

    limit: int
    reserved: int = 0
    depth: int = 0
    in_flight: int = 0  # Images with workers.
    interruptions: int = 0  # Workers that ended with work to do, or stood still, since the start.
    ahead: dict[int, int] = field(default_factory=dict)  # Images waiting or reserved, by priority.
    heap: list[tuple[float, int, T]] = field(default_factory=list)
    aged: bool = False  # Whether `oldest_s` is asked for.
    ages: list[tuple[float, int, T]] = field(default_factory=list)  # The heap's items by `queued_s`.
    clients: dict[str, tuple[int, float]] = field(default_factory=dict)  # Requests under way, the last one's rank.
    lateness: Lateness = field(default_factory=Lateness)
    urgent_lateness: Lateness = field(default_factory=Lateness)  # Of priorities above the normal one: they overtake.
    usual: float = 1.0  # Images in recent batches: the expected fill of the next ones.

    def check_room(self, model: str, images: int) -> None:
        """Raises QueueFullError where `images` more are too many, NeverRoomError where they always are; `model` for the
        sentence.
        """
        if images > self.limit:
            raise NeverRoomError(f"{images} images are more than the {self.limit} that may wait for {model}")
        taken = self.reserved + self.depth
        if taken + images > self.limit:
            raise QueueFullError(f"{model} has {taken} of {self.limit} images waiting")

    def late(self, items: Iterable[T], answered_s: float) -> None:
        """Learn from when items were answered, or would have been.

        Items of one batch share its noise, so only the latest counts. Of a request only the first image counts: the
        others also wait for each other. What was admitted before a worker was lost or stood still, or without one, says
        nothing: its answer waited for that, not for the queue.
        """
        late_s: dict[bool, tuple[float, bool]] = {}
        for item in items:
            admitted = item.reservation
            expected_s = admitted.expected_s
            if expected_s is None or admitted.interruptions != self.interruptions:
                continue
            if item.position or item.attempt is not FIRST:
                continue
            seconds, urgent = answered_s - admitted.admitted_s - expected_s, admitted.priority > 0
            latest = late_s.get(urgent)
            if latest is None or seconds > latest[0]:
                late_s[urgent] = seconds, admitted.alone
        for urgent, (seconds, alone) in late_s.items():
            self.lateness_of(urgent).learn(seconds, alone=alone)

    def lateness_of(self, priority: int) -> Lateness:
        """What to add to an expectation at this priority: what waits elsewhere, such as to be decoded, is overtaken."""
        return self.urgent_lateness if priority > 0 else self.lateness

    def count(self, priority: int, images: int) -> None:
        """Count images that came (or, negative, went) at a priority."""
        left = self.ahead.get(priority, 0) + images
        if left:
            self.ahead[priority] = left
        else:
            del self.ahead[priority]  # Clients choose priorities: what is unused must not stay.

    def ahead_of(self, priority: int) -> int:
        """Images waiting or reserved that go before new ones of this priority."""
        if len(self.ahead) == 1 and priority in self.ahead:  # Most have the same.
            return self.ahead[priority]
        return sum([images for other, images in self.ahead.items() if other >= priority])

    def begin(self, reservation: Reservation) -> None:
        """Keep room for its images; count a request of its client, and how many of that client's it is behind."""
        reservation.left = reservation.images
        reservation.interruptions = self.interruptions
        reservation.alone = not (self.reserved or self.depth or self.in_flight)
        self.reserved += reservation.left
        lateness = self.urgent_lateness if reservation.priority > 0 else self.lateness
        lateness.admitted_s = reservation.admitted_s
        self.count(reservation.priority, reservation.left)
        if client := reservation.client:
            reservation.behind, last_s = self.clients.get(client, (0, -math.inf))
            self.clients[client] = (reservation.behind + 1, last_s)

    def end(self, reservation: Reservation) -> None:
        """The request of a reservation has ended: give back what is left of it. Idempotent."""
        if reservation.left:
            self.reserved -= reservation.left
            self.count(reservation.priority, -reservation.left)
            reservation.left = 0
        client, reservation.client = reservation.client, ""
        if client:
            requests, last_s = self.clients[client]
            if requests > 1:
                self.clients[client] = (requests - 1, last_s)
            else:
                del self.clients[client]  # Addresses are the clients': what asks nothing must not stay.

    def rank_s(self, reservation: Reservation, now: float, position: int, seconds_an_image: float) -> float:
        """The rank of an image of a request, its priority not included.

        The requests that a client has under way count against its next one: a client that asks little goes before all
        but the first requests of one that asks much. The requests of one client keep their order.
        """
        client = reservation.client
        if client and reservation.first_s is None:
            requests, last_s = self.clients[client]
            reservation.first_s = max(now + reservation.behind * seconds_an_image, last_s)
            self.clients[client] = (requests, reservation.first_s)
        first_s = reservation.first_s
        rank_s = now if first_s is None or first_s < now else first_s
        return rank_s + position * seconds_an_image if position else rank_s

    def push(self, item: T, order: int) -> None:
        """Let an item wait that is counted; `order` decides between equal ranks."""
        heapq.heappush(self.heap, (item.rank_s, order, item))
        if self.aged:
            heapq.heappush(self.ages, (item.queued_s, order, item))
        item.status = QUEUED
        self.depth += 1

    def first(self) -> T:
        """The next item. Raises IndexError when none waits."""
        return self.heap[0][2]

    def take(self, item: T) -> None:
        """Take a waiting item out."""
        item.status = COMPUTING
        self.depth -= 1
        self.count(item.reservation.priority, -1)
        # The first is always one that waits: what was sent must not be here a second time when it is requeued.
        while self.heap and self.heap[0][2].status is not QUEUED:
            heapq.heappop(self.heap)
        # Other items stay until they surface; rebuilt when they are most of it, memory stays bounded.
        if len(self.heap) > 2 * self.depth + 16:
            self.heap = [entry for entry in self.heap if entry[2].status is QUEUED]
            heapq.heapify(self.heap)
        if self.aged:
            while self.ages and self.ages[0][2].status is not QUEUED:
                heapq.heappop(self.ages)
            if len(self.ages) > 2 * self.depth + 16:
                waiting = [entry for entry in self.heap if entry[2].status is QUEUED]
                self.ages = [(item.queued_s, order, item) for _, order, item in waiting]
                heapq.heapify(self.ages)

    def take_all(self) -> list[T]:
        """Take every waiting item out, in order."""
        ordered = sorted(self.heap, key=lambda entry: entry[:2])
        items = [item for _, _, item in ordered if item.status is QUEUED]
        for item in items:
            self.take(item)
        return items

    def oldest_s(self) -> float:
        """When the item that has waited longest was enqueued; only where `aged`. Raises IndexError when none waits."""
        return self.ages[0][0]
