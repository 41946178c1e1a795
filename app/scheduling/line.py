"""Line of images in a queue, and clients' turns in it: before decoding and before a device the same.

Owns: the order of what waits, which of a client's images count against its next one, and how a rank follows from turn,
place in the request and priority. Pure logic; times are in seconds, the clock is a parameter. Must not know what is
waited for.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import Protocol, TypeVar

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
    """Element of a line, which sets `order`: the order among equal ranks."""

    rank_s: float
    order: int


R = TypeVar("R", bound=Ranked)


class Line(list[tuple[float, int, R]]):
    """Line of what waits, by rank: a sorted list, so that the number of items before another one is known at once."""

    __slots__ = ()

    def push(self, item: R, order: int) -> None:
        """Add an item; `order` decides between equal ranks."""
        item.order = order
        insort(self, (item.rank_s, order, item))

    def discard(self, item: R) -> None:
        """Remove an item that waits."""
        del self[bisect_left(self, (item.rank_s, item.order))]

    def before(self, rank_s: float) -> int:
        """Return the number of items before one of this rank that comes now."""
        return bisect_left(self, (rank_s, math.inf))

    def after(self, rank_s: float) -> list[R]:
        """Return the items that go after one of this rank that comes now."""
        return [item for _, _, item in self[self.before(rank_s) :]]


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
