"""Who is let in: before a request's body is read, and once more, with room in the queue, when it has arrived.

Owns: every reason to refuse a request that is well formed, its count and its sentence. Must not know a transport or
what the request holds.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import NoReturn

from app.errors import ServiceError, invalid_request
from app.fleet.dispatcher import Dispatcher
from app.fleet.served_model import ModelPool
from app.scheduling.queue import Checked, DeadlineUnreachableError, NeverRoomError, QueueFullError, Reservation
from app.serving.terms import Terms


class Admission:
    """To the queues of the dispatcher's models."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.refusing = False
        """The service is about to stop, and takes no requests any more."""
        self._watchers: set[asyncio.Event] = set()  # Set whenever a request has ended.

    def check(self, served: ModelPool, terms: Terms) -> None:
        """Refuse a request of at least one image before its body is read, if it would be refused afterwards.

        Raises DRAINING, NOT_READY, QUEUE_FULL, DEADLINE_UNREACHABLE. It reserves nothing: an upload may take its time.
        """
        if self.refusing:
            raise ServiceError("DRAINING", "the service is shutting down", retry_after_s=5)
        name, now_s = served.model.name, time.monotonic()
        self._dispatcher.refuse_unless_served(name)
        try:
            expected_s = self._dispatcher.scheduler.check(name, 1, terms.deadline_s, terms.priority, now_s)
            terms.checked = Checked(name, terms.deadline_s, terms.priority, now_s, expected_s)
        except (QueueFullError, DeadlineUnreachableError) as error:
            self._refuse(served, error, 1)

    def reserved(self, served: ModelPool, count: int, terms: Terms) -> Room:
        """Room in the queue for the `count` items of a request, a context manager that gives it back.

        Raises DEADLINE_EXCEEDED, NOT_READY, INVALID_REQUEST, QUEUE_FULL, DEADLINE_UNREACHABLE.
        """
        now_s = time.monotonic()
        if now_s >= terms.deadline_s:
            served.metrics.expired["upload"].inc(count)
            raise ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the request had arrived")
        self._dispatcher.refuse_unless_served(served.model.name)
        if terms.client_lease is not None:
            terms.client_lease.admit_images(count)
        scheduler = self._dispatcher.scheduler
        try:
            reservation = scheduler.reserve(
                served.model.name,
                count,
                terms.deadline_s,
                terms.priority,
                now_s,
                client=terms.client,
                checked=terms.checked,
            )
        except NeverRoomError as error:
            raise invalid_request(f"{error}; send fewer at a time") from None
        except (QueueFullError, DeadlineUnreachableError) as error:
            self._refuse(served, error, count)
        return Room(self, served, reservation, count)

    def ended(self, reservation: Reservation) -> None:
        """A request has ended that had this reservation."""
        for watcher in self._watchers:
            watcher.set()
        self._dispatcher.scheduler.release(reservation)

    async def drained(self, *models: ModelPool) -> None:
        """Until no accepted image of these models waits for its answer."""
        ended = asyncio.Event()
        self._watchers.add(ended)
        try:
            while any(served.images_under_way for served in models):
                ended.clear()
                await ended.wait()
        finally:
            self._watchers.discard(ended)

    def _refuse(self, served: ModelPool, error: Exception, count: int) -> NoReturn:
        retry_after_s = self._dispatcher.retry_after_s(served.model.name)
        if isinstance(error, QueueFullError):
            served.metrics.rejected["queue_full"].inc(count)
            raise ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=retry_after_s) from None
        served.metrics.rejected["deadline"].inc(count)
        message = f"{error}, and the deadline is before that; try again"
        raise ServiceError("DEADLINE_UNREACHABLE", message, retry_after_s=retry_after_s) from None


class Room:
    """What a request has reserved, as long as the context lasts."""

    __slots__ = ("_admission", "_count", "_reservation", "_served")

    def __init__(self, admission: Admission, served: ModelPool, reservation: Reservation, count: int) -> None:
        self._admission, self._served, self._reservation, self._count = admission, served, reservation, count

    def __enter__(self) -> Reservation:
        self._served.images += self._count
        return self._reservation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._served.images -= self._count
        self._admission.ended(self._reservation)
