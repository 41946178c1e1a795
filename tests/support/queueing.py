"""Images in front of a scheduler, for tests: each its own reservation's, with whatever a test puts into it.

Owns: nothing but this shorthand.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.scheduling.queue import Attempt, Checked, Item, Reservation
from app.scheduling.scheduler import Scheduler


@dataclass(eq=False, slots=True)
class Image(Item):
    """An item with a test's own `payload`."""

    payload: object

    @property
    def model(self) -> str:
        """Whose queue it is in."""
        return self.reservation.model

    @property
    def deadline_s(self) -> float:
        """Of its request."""
        return self.reservation.deadline_s

    @property
    def priority(self) -> int:
        """Of its request."""
        return self.reservation.priority

    @property
    def alone(self) -> bool:
        """Whether it must be its batch's only one."""
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
    checked: Checked | None = None,
) -> Reservation:
    """Room for so many images, as `Scheduler.reserve` gives it or refuses it."""
    reservation = Reservation(model, images, priority, deadline_s, client)
    scheduler.reserve(reservation, now, checked)
    return reservation


def enqueue(
    scheduler: Scheduler[Image], reservation: Reservation, payload: object, now: float, position: int = 0
) -> Image:
    """An image of a reservation that waits from now on. Raises ValueError."""
    image = Image(reservation, position, payload)
    scheduler.enqueue(image, now)
    return image


def requeue(scheduler: Scheduler[Image], image: Image, *, alone: bool) -> None:
    """Let an image of a lost batch wait again; `alone`: it may have been the reason."""
    if alone:
        image.attempt = Attempt.ALONE
    scheduler.requeue(image)
