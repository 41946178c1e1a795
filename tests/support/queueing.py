"""Images in front of a scheduler, for tests: each has its own reservation, with any payload of a test.

Owns: nothing but this shorthand.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.scheduling.queue import Attempt, Item, Reservation
from app.scheduling.scheduler import Scheduler


@dataclass(eq=False, slots=True)
class Image(Item):
    """Item with a test's own `payload`."""

    payload: object

    @property
    def model(self) -> str:
        """Model in whose queue it is."""
        return self.reservation.model

    @property
    def deadline_s(self) -> float:
        """Deadline of its request."""
        return self.reservation.deadline_s

    @property
    def priority(self) -> int:
        """Priority of its request."""
        return self.reservation.priority

    @property
    def alone(self) -> bool:
        """True if it must be alone in its batch."""
        return self.attempt is Attempt.ALONE


def reserve(
    scheduler: Scheduler[Image],
    model: str,
    images: int,
    deadline_s: float,
    priority: int,
    now: float,
    *,
    client: str = "",
    found_s: tuple[float, float | None] | None = None,
) -> Reservation:
    """Reserve room for so many images, if `Scheduler.reserve` admits them; `found_s`: time and result of a `check`."""
    reservation = Reservation(model, images, priority, deadline_s, client)
    if found_s is not None:
        reservation.admitted_s, reservation.expected_s = found_s
    scheduler.reserve(reservation, now)
    return reservation


def enqueue(
    scheduler: Scheduler[Image], reservation: Reservation, payload: object, now: float, position: int = 0
) -> Image:
    """Enqueue an image of a reservation, to wait from now on. Raises ValueError."""
    image = Image(reservation, position, payload)
    scheduler.enqueue(image, now)
    return image


def requeue(scheduler: Scheduler[Image], image: Image, *, alone: bool) -> None:
    """Requeue an image of a lost batch; `alone`: it may have been the reason."""
    if alone:
        image.attempt = Attempt.ALONE
    scheduler.requeue(image)
