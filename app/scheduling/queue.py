"""Queue of one model's images, in the order in which they will run.

Owns: a line of images and the clients' turns in it, before decoding and before a device the same; one model's queue and
its bound; and the lateness of answers against the expectation. Must not know workers, nor how long batches take. Pure
logic; times are in seconds, the clock is a parameter.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

import msgspec

PRIORITY_WORTH_S = 1.0
"""Waiting time that one level of priority is worth: an item that waits long enough overtakes, so that none starves."""

REQUEST_SHARE = 0.25
"""Share of the workers' rate at which the images of one request queue, as if they came one by one. A large request
leaves room for later ones, and loses nothing on an idle device. One client's requests leave room for others too."""


def rank_s(turn_s: float, position: int, image_s: float, priority: int) -> float:
    """Return the rank of an image at `position` of its request; the least rank goes first.

    `turn_s`: the turn of the request; `image_s`: seconds of all workers together for an image.
    """
    if position:
        turn_s += position * image_s / REQUEST_SHARE
    return turn_s - priority * PRIORITY_WORTH_S


class Ranked(Protocol):
    """Element of a line; `order`: the order among equal ranks."""

    rank_s: float
    order: int


R = TypeVar("R", bound=Ranked)


class Line(list[tuple[float, int, R]]):
    """Line of what waits, by rank: a sorted list, so that the number of items before another one is known at once."""

    __slots__ = ()

    def before(self, rank_s: float) -> int:
        """Return the number of items before one of this rank that comes now."""
        return bisect_left(self, (rank_s, math.inf))


NOTHING = 0, -math.inf


class Turns(dict[str, tuple[int, float]]):
    """Turns of the clients in a queue: how much each has in it, and its last turn."""

    __slots__ = ()

    def begin(self, client: str, turn_s: float = -math.inf) -> int:
        """Count one more of a client, with this turn if it has one already. Return how much there was before."""
        before, last_s = self.get(client, NOTHING)
        self[client] = before + 1, max(last_s, turn_s)
        return before

    def take(self, client: str, at_s: float) -> float:
        """Return the client's turn at `at_s`: never before its last one, so that its images keep their order."""
        count, last_s = self[client]
        self[client] = count, max(at_s, last_s)
        return max(at_s, last_s)

    def end(self, client: str) -> None:
        """Count one less of a client."""
        count, last_s = self.pop(client)
        if count > 1:  # Addresses are the clients': what has nothing here must not stay.
            self[client] = count - 1, last_s


RARE_S = 5.0
MOST_RATE = 0.125
"""Share by which an estimate moves towards a rare answer: the time since the last one, of RARE_S; at most MOST_RATE. So
it does not matter how many answers there are."""


class Lateness:
    """Delay of answers beyond the queue's wait: decoding, the event loop, the pipe, other processes.

    Mean and deviation follow TCP's estimate of round trips (RFC 6298), but move more slowly while answers are many:
    under overload every dip admits a crowd. Rare answers count more, so that what was learned is forgotten in seconds,
    however few they are. An outlier moves them by no more than a limit: one late answer after a pause predicts nothing.
    `admitted_s`: last admission whose answer will teach this estimate; `answered_s`: time of the last answer.
    """

    _MEAN_RATE = 1 / 32
    _DEVIATIONS = 4.0
    _CREDIBLE = 3.0
    _ALWAYS_CREDIBLE_S = 0.1
    _FAR = 4.0

    def __init__(self) -> None:
        self.admitted_s = self._aged_s = self.answered_s = -math.inf
        self._mean_s = 0.0
        self._deviation_s = 0.0

    @property
    def seconds(self) -> float:
        """Return what to add to an expectation: most answers come before it."""
        return max(0.0, self._mean_s + self._DEVIATIONS * self._deviation_s)

    def learn(self, seconds: float, now: float, *, alone: bool = False) -> None:
        """Learn from an answer that came `seconds` later (negative: earlier) than expected. `alone`: nothing else was
        in flight at its admission; if such an answer comes far earlier than this estimate, forget half of the estimate.
        """
        most_s = max(self._CREDIBLE * self._deviation_s, self._ALWAYS_CREDIBLE_S)
        off_s = min(seconds - self._mean_s, most_s)
        rate = max(self._MEAN_RATE, min((now - self.answered_s) / RARE_S, MOST_RATE))
        self.answered_s = self._aged_s = now
        self._deviation_s += 2 * rate * (min(abs(off_s), most_s) - self._deviation_s)
        self._mean_s += rate * off_s
        if alone and self.seconds > max(self._FAR * seconds, self._ALWAYS_CREDIBLE_S):
            self._keep(0.5)

    def age(self, now: float, period_s: float) -> bool:
        """Forget half of the estimate for each period since the last answer, if one has passed; return True if so."""
        periods = (now - self._aged_s) / period_s
        if periods < 1:
            return False
        self._keep(0.5**periods)
        self._aged_s = now
        return True

    def _keep(self, share: float) -> None:
        self._mean_s *= share
        self._deviation_s *= share


class QueueFullError(Exception):
    """The model's queue has no room for the images now."""


class NeverRoomError(Exception):
    """The images are more than the queue can ever hold."""


class DeadlineUnreachableError(Exception):
    """The answer cannot come before the deadline; `expected_s`: seconds until it could."""

    def __init__(self, expected_s: float) -> None:
        super().__init__(f"the answer would take {expected_s * 1e3:.0f} ms")
        self.expected_s = expected_s


@dataclass(eq=False, slots=True)
class Reservation:
    """Room in a model's queue for the images of one request: `left` of `images` are not yet in the queue.

    `client`: the client of the request, "" if unknown. The scheduler fills the other fields at admission; who called
    `check` a moment before fills `admitted_s` and `expected_s`. `expected_s`: seconds from `admitted_s` to the expected
    first answer, without lateness; None if the model had no worker, or if the wait for a decoder was unknown.
    `interruptions`: the queue's count at admission. `behind`: number of requests that the client had in flight;
    `first_s`: rank of the first image in the queue; `alone`: nothing else of the model was in flight; `lateness`: the
    estimate that its answer will teach; `batch_s`: seconds of the next batch on a free worker, 0 without a worker.
    """

    model: str
    images: int
    priority: int
    deadline_s: float
    client: str = ""
    left: int = field(init=False, default=0)
    admitted_s: float = field(init=False, default=-math.inf)
    expected_s: float | None = field(init=False, default=None)
    interruptions: int = field(init=False, default=0)
    behind: int = field(init=False, default=0)
    first_s: float | None = field(init=False, default=None)
    alone: bool = field(init=False, default=False)
    lateness: Lateness | None = field(init=False, default=None)
    batch_s: float = field(init=False, default=0.0)


class ItemStatus(Enum):
    """Stage of an item; the value is the stage's name in metrics."""

    FILLING = "decode"
    """A decoder or a copy fills the slot, for the first time or again."""
    QUEUED = "queue"
    COMPUTING = "infer"
    """The item left the queue: a worker has it, or the caller that took it out ends it at once."""
    ENDED = "ended"
    """The reply is given. A decoder or worker that still uses the slot gives it back later."""


class Attempt(Enum):
    """Attempt at which an item is computed."""

    FIRST = 1
    AGAIN = 2
    """Second attempt: a batch with the item was lost or failed."""
    ALONE = 3
    """Attempt in a batch of one, with nothing else on the worker: the item may have caused the failure."""


FILLING, QUEUED, COMPUTING, ENDED = ItemStatus
FIRST, AGAIN, ALONE = Attempt
"""Short names of the members: in Python 3.11 each look-up in an enumeration is a call, and an item needs a dozen."""


@dataclass(eq=False, slots=True)
class Item:
    """One image of a request, at `position` in it; the owner's subclass adds fields. `queued_s`: time of its first wait
    for a worker, 0 before; `rank_s`, `order`: its order in the queue.
    """

    reservation: Reservation
    position: int
    status: ItemStatus = field(init=False, default=FILLING)
    attempt: Attempt = field(init=False, default=FIRST)
    queued_s: float = field(init=False, default=0.0)
    rank_s: float = field(init=False, default=0.0)
    order: int = field(init=False, default=0)


T = TypeVar("T", bound=Item)


class Batch(msgspec.Struct, Generic[T], frozen=True):
    """Items dispatched to a worker together, padded to `size`, one of the model's batch sizes."""

    id: int
    worker: str
    model: str
    items: tuple[T, ...]
    size: int
    dispatched_s: float


@dataclass(frozen=True, slots=True)
class LostBatches(Generic[T]):
    """Batches that a lost worker never finished, in the order of dispatch."""

    begun: tuple[Batch[T], ...]
    """Batches that may have been running: one of them may have caused the loss."""
    waiting: tuple[Batch[T], ...]
    """Batches that cannot have begun."""


@dataclass(slots=True)
class Queue(Generic[T]):
    """Queue of a model's images, reserved and waiting, in order."""

    limit: int
    reserved: int = 0
    depth: int = 0
    in_flight: int = 0  # Images with workers.
    interruptions: int = 0  # Workers that ended with work to do, or stood still, since the start.
    ahead: dict[int, int] = field(default_factory=dict)  # Images waiting or reserved, by priority.
    line: Line[T] = field(default_factory=Line)
    turns: Turns = field(default_factory=Turns)  # Of the requests under way.
    latenesses: dict[tuple[bool, int], Lateness] = field(default_factory=dict)  # By kind of request.
    usual: float = 1.0  # Images in recent batches: the expected fill of the next ones.

    def full(self, model: str, images: int) -> Exception:
        """Return the error of a request whose images do not fit now, or never. `model` is named in the message."""
        if images > self.limit:
            return NeverRoomError(f"{images} images are more than the {self.limit} that may wait for {model}")
        return QueueFullError(f"{model} has {self.reserved + self.depth} of {self.limit} images waiting")

    def late(self, items: Iterable[T], answered_s: float) -> None:
        """Learn lateness from items that were answered at `answered_s`, or would have been.

        Items of one batch share its noise, so only the latest counts. Of a request only the first image counts: the
        others also wait for each other. Items admitted before a worker was lost or stood still, or without a worker, do
        not count: their answers waited for that, not for the queue.
        """
        late_s: dict[Lateness, tuple[float, bool]] = {}
        for item in items:
            admitted = item.reservation
            expected_s, lateness = admitted.expected_s, admitted.lateness
            if expected_s is None or lateness is None or admitted.interruptions != self.interruptions:
                continue
            if item.position or item.attempt is not FIRST:
                continue
            seconds = answered_s - admitted.admitted_s - expected_s
            latest = late_s.get(lateness)
            if latest is None or seconds > latest[0]:
                late_s[lateness] = seconds, admitted.alone
        for lateness, (seconds, alone) in late_s.items():
            lateness.learn(seconds, answered_s, alone=alone)

    def lateness_of(self, priority: int, client: str, *, answered: bool = False) -> Lateness:
        """Return the lateness for a client's next request at this priority. `answered`: of its kind, or of the next
        kind with fewer requests ahead that has had an answer.
        """
        behind = self.turns.get(client, NOTHING)[0]
        lateness = self._lateness(priority, behind)
        while answered and behind and lateness.answered_s == -math.inf:
            behind >>= 1
            lateness = self._lateness(priority, behind)
        return lateness

    def _lateness(self, priority: int, behind: int) -> Lateness:
        """Return the lateness behind so many requests of the same client.

        Requests that come later overtake those that are behind others of their client, and urgent images overtake all,
        at other stages too, such as decoding. So each kind learns its own lateness.
        """
        kind = priority > 0, behind.bit_length()
        return self.latenesses.get(kind) or self.latenesses.setdefault(kind, Lateness())

    def count(self, priority: int, images: int) -> None:
        """Count images that came (negative: went) at a priority."""
        left = self.ahead.get(priority, 0) + images
        if left:
            self.ahead[priority] = left
        else:
            del self.ahead[priority]  # Clients choose priorities: what is unused must not stay.

    def ahead_of(self, client: str, images: int, priority: int, now: float, image_s: float) -> int:
        """Return the number of images, waiting or reserved, that go before the last of `images` of a new request.

        `image_s`: as in `turn_s`; unused if nothing waits.
        """
        is_same = len(self.ahead) == 1 and priority in self.ahead  # Most have the same priority.
        ahead = self.ahead[priority] if is_same else sum([n for other, n in self.ahead.items() if other >= priority])
        if not ahead or not self.depth:
            return ahead
        requests, last_s = self.turns.get(client, NOTHING)
        turn_s = max(now + requests * image_s / REQUEST_SHARE, last_s)
        last_s = rank_s(turn_s, images - 1, image_s, priority)
        before = self.line.before(last_s)
        if is_same:
            return ahead - len(self.line) + before
        return ahead - sum([item.reservation.priority >= priority for _, _, item in self.line[before:]])

    def begin(self, reservation: Reservation) -> None:
        """Reserve room for the images; count the client's request, and note how many of its requests are ahead."""
        reservation.left = reservation.images
        reservation.interruptions = self.interruptions
        reservation.alone = not (self.reserved or self.depth or self.in_flight)
        self.reserved += reservation.left
        self.count(reservation.priority, reservation.left)
        if reservation.client:
            reservation.behind = self.turns.begin(reservation.client)
        reservation.lateness = self._lateness(reservation.priority, reservation.behind)
        reservation.lateness.admitted_s = reservation.admitted_s

    def turn_s(self, reservation: Reservation, now: float, image_s: float) -> float:
        """Return the turn of a request whose next image comes now. `image_s`: seconds of all workers for an image.

        The requests that a client has in flight count against its next one: a client that asks little goes before all
        but the first requests of one that asks much. The requests of one client keep their order.
        """
        if reservation.client and reservation.first_s is None:
            at_s = now + reservation.behind * image_s / REQUEST_SHARE
            reservation.first_s = self.turns.take(reservation.client, at_s)
        first_s = reservation.first_s
        return now if first_s is None or first_s < now else first_s

    def push(self, item: T, order: int) -> None:
        """Put a counted item into the queue; `order` decides between equal ranks."""
        insort(self.line, (item.rank_s, order, item))
        item.order, item.status = order, QUEUED
        self.depth += 1

    def take(self, item: T) -> None:
        """Take a waiting item out."""
        del self.line[bisect_left(self.line, (item.rank_s, item.order))]
        item.status = COMPUTING
        self.depth -= 1
        self.count(item.reservation.priority, -1)

    def take_all(self) -> list[T]:
        """Take every waiting item out, in order."""
        items = [item for _, _, item in self.line]
        for item in items:
            self.take(item)
        return items

    def oldest_s(self) -> float:
        """Return when the item that waits longest was enqueued. It looks at all: call it for less than a batch."""
        return min(item.queued_s for _, _, item in self.line)
