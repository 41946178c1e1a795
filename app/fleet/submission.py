"""One item in the owner's hands, from its slot to its one reply.

Owns: its status. Must not know what fills its slot, nor who asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from app import logs
from app.fleet.served_model import ModelPool
from app.link import Reply, Terms
from app.worker.messages import Run
from models import Options, Placement, TensorOptions

if TYPE_CHECKING:
    from app.decoding.image import PendingImage
    from app.scheduling.queue import Batch, Item, Reservation

NOWHERE = Placement(0, 0)
"""Where a row of tensors lies."""


class ItemStatus(Enum):
    """Where an item is; the value is what metrics call that stage."""

    FILLING = "decode"
    """Its slot is being filled, for the first time or once more."""
    QUEUED = "queue"
    """It waits for a worker."""
    COMPUTING = "infer"
    """A worker has it."""
    ENDED = "ended"
    """Its reply is given. Who has its slot in hand (a decoder, a worker) gives it back when that is over."""


@dataclass(eq=False, slots=True)
class Submission:
    """An item. `ended`: is called with its one reply; `image`: what decoders have of it, while its slot is filled;
    `refill`: where its slot holds a file, fills it with pixels instead; `item`: its place in the queue, once it had
    one; `request_id`: for the log. Seconds are of `time.monotonic()`.
    """

    token: int
    pool: ModelPool
    slot: int
    options: Options | TensorOptions
    position: int
    reservation: Reservation
    terms: Terms
    ended: Callable[[Submission, Reply], None]
    begun_s: float
    queued_s: float = 0.0
    status: ItemStatus = ItemStatus.FILLING
    placement: Placement = NOWHERE
    image: PendingImage | None = None
    refill: Callable[[Submission], None] | None = None
    item: Item[Submission] | None = None
    request_id: str = field(default_factory=logs.request_id.get)

    def end(self, reply: Reply) -> None:
        """Give the reply, unless there was one."""
        if self.status is not ItemStatus.ENDED:
            self.status = ItemStatus.ENDED
            self.ended(self, reply)

    def give_slot(self) -> None:
        """No process looks at the slot any more."""
        self.pool.slots.give(self.slot)
        self.item = None  # Each would keep the other until garbage is collected.


def run_of(batch: Batch[Submission], model: int) -> Run:
    """What a worker hears of a batch: one item's options for all where they are the same, as they mostly are."""
    items = [item.payload for item in batch.items]
    asked = [item.options for item in items]
    if all([each is asked[0] for each in asked]):  # noqa: C419 - faster
        asked = asked[:1]
    options = tuple([each for each in asked if isinstance(each, Options)])
    tensor_options = tuple([each for each in asked if isinstance(each, TensorOptions)])
    slots = tuple([item.slot for item in items])
    return Run(batch.id, model, slots, options, batch.size, files_among(batch.items), tensor_options)


def files_among(items: Sequence[Item[Submission]]) -> tuple[int, ...]:
    """The positions of those whose slots hold a file."""
    return tuple([position for position, item in enumerate(items) if item.payload.refill is not None])
