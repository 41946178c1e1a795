"""Clients that ask again as soon as they are answered: a device may stand still a moment for the next image of one.

Owns: who does so, and which worker waits for whom until when. Pure logic; times are in seconds, the clock is a
parameter. Must not know queues, nor how long batches take.

A client with one request at a time is answered when a batch ends, and asks again when the next one has just begun: it
waits for nearly all of that one. Where the next batch begins a moment later, the client's image has a place in it, and
waits for one batch in place of two. The device stands still meanwhile, which costs images a second. So a worker waits
only for a client that has nothing else under way, that mostly comes within the time, and that has a place in the next
batch: for nobody in a crowd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST_PAUSE_S = 0.001
"""Less than this the event loop's timers cannot."""
_MOST_CLIENTS = 256
"""That are remembered: addresses are the clients' to choose."""
_LEARNING_RATE = 0.2
_MOSTLY = 0.7
"""Of a client's last returns, so many must have been in time."""


@dataclass(slots=True)
class _Client:
    """`answered_s`: when nothing of it was under way any more, None while something is. `allowed_s`: how soon after
    that it was to come. `in_time`: the share of its returns that did, the last ones counting most.
    """

    answered_s: float | None = None
    allowed_s: float = 0.0
    in_time: float = 0.0


class Returning:
    """Of one scheduler; workers and clients go by their names."""

    __slots__ = ("_awaited", "_clients")

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}  # The one answered last is the last.
        self._awaited: dict[str, tuple[set[str], float]] = {}  # Clients for whom a worker waits, and until when.

    def answered(self, worker: str, clients: Sequence[str], allowed_s: float, places: int, now: float) -> None:
        """A worker's batch has ended, and with it all that these clients had under way. The worker waits `allowed_s`
        for them at most, and for no more of them than the next batch has places for.
        """
        if allowed_s < LEAST_PAUSE_S:
            return
        awaited = {client for client in clients if self._answered(client, allowed_s, now) >= _MOSTLY}
        if awaited and len(awaited) <= places:
            self._awaited[worker] = awaited, now + allowed_s

    def _answered(self, client: str, allowed_s: float, now: float) -> float:
        found = self._clients.pop(client, None) or _Client()
        self._clients[client] = found
        found.answered_s, found.allowed_s = now, allowed_s
        if len(self._clients) > _MOST_CLIENTS:
            del self._clients[next(iter(self._clients))]
        return found.in_time

    def came(self, client: str, now: float) -> None:
        """An image of a client is in the queue."""
        found = self._clients.get(client)
        if found is not None and found.answered_s is not None:
            in_time = now <= found.answered_s + found.allowed_s
            found.in_time += _LEARNING_RATE * (in_time - found.in_time)
            found.answered_s = None
            for awaited, _ in self._awaited.values():
                awaited.discard(client)

    def likely(self, clients: Iterable[str]) -> bool:
        """Whether any of these will be waited for, as far as one knows."""
        return any([each in self._clients and self._clients[each].in_time >= _MOSTLY for each in clients])  # noqa: C419 - faster

    def waits(self, worker: str, now: float) -> bool:
        """Whether a worker waits for somebody."""
        awaited, until_s = self._awaited.get(worker, ((), now))
        return bool(awaited) and now < until_s

    def ends_s(self) -> list[float]:
        """When workers have waited long enough."""
        return [until_s for awaited, until_s in self._awaited.values() if awaited]

    def begun(self, worker: str) -> None:
        """A worker has a batch, or is gone."""
        self._awaited.pop(worker, None)
