"""What the owner has in hand: a model with its slots and counters, and each of its items until its one reply.

Owns: these records. Must not know what fills a slot, nor who asked for it; nor workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app import logs
from app.link import Reply, ServedModel, Terms
from app.observability.metrics import Metrics, ModelMetrics
from app.observability.triton_statistics import ModelStatistics
from app.processes.arena import FreeSlots
from app.scheduling.queue import ENDED, Batch, Item
from app.worker.messages import Run
from models import Model, Options, Placement, TensorOptions

if TYPE_CHECKING:
    from app.decoding.waiting import PendingImage


NOWHERE = Placement(0, 0)
"""Where a row of tensors lies."""


class ModelPool(ServedModel):
    """A model with its slots. `index` is also its pool in the arena and its position in every `Load`."""

    def __init__(self, index: int, model: Model, slots: int, metrics: Metrics) -> None:
        super().__init__(index, model, ModelMetrics(metrics, model.name), ModelStatistics())
        self.slots = FreeSlots(slots)
        self.forms = [self]
        """This one and its other form, each with slots and a queue of its own."""
        self.unloaded = False
        """New requests are refused: no worker has the model, or the last one is about to give it up."""
        self.passes_files = False
        """Whether its workers decode files, which then go into slots in place of pixels (--decode)."""
        self.mirror: Callable[[Sequence[Any], Sequence[Any]], None] | None = None
        """Is called with the items of each batch and their results, before their slots are given back."""
        self.images = 0
        """Images accepted and not yet answered."""
        self._watchers: set[asyncio.Event] = set()  # Set whenever a request of any form has ended.

    def add_form(self, floats: ModelPool) -> None:
        """Make `floats` the form of this model that takes normalised tensors."""
        self.floats = floats
        self.forms.append(floats)
        floats.metrics, floats.statistics, floats._watchers = self.metrics, self.statistics, self._watchers

    def answered(self, count: int) -> None:
        """A request for so many images has ended."""
        self.images -= count
        for watcher in self._watchers:
            watcher.set()

    async def drained(self) -> None:
        """Until no accepted image, in any form, waits for its answer."""
        ended = asyncio.Event()
        self._watchers.add(ended)
        try:
            while self.images_under_way:
                ended.clear()
                await ended.wait()
        finally:
            self._watchers.discard(ended)

    @property
    def images_under_way(self) -> int:
        """Images accepted and not yet answered, in any form."""
        return sum(form.images for form in self.forms)

    @property
    def slots_taken(self) -> int:
        """Slots in use, in any form."""
        return sum(form.slots.taken for form in self.forms)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its forms in the scheduler."""
        return tuple(form.model.name for form in self.forms)


@dataclass(eq=False, slots=True)
class Submission(Item):
    """An item. `ended`: is called with its one reply; `image`: what decoders have of it, while its slot is filled;
    `refill`: where its slot holds a file, fills it with pixels instead; `request_id`: for the log. Seconds are of
    `time.monotonic()`.
    """

    token: int
    pool: ModelPool
    slot: int
    options: Options | TensorOptions
    terms: Terms
    ended: Callable[[Submission, Reply], None]
    begun_s: float
    placement: Placement = NOWHERE
    image: PendingImage | None = None
    refill: Callable[[Submission], None] | None = None
    request_id: str = field(default_factory=logs.request_id.get)

    def end(self, reply: Reply) -> None:
        """Give the reply, unless there was one."""
        if self.status is not ENDED:
            self.status = ENDED
            self.ended(self, reply)

    def give_slot(self) -> None:
        """No process looks at the slot any more."""
        self.pool.slots.give(self.slot)


def run_of(batch: Batch[Submission], model: int) -> Run:
    """What a worker hears of a batch: one item's options for all where they are the same, as they mostly are."""
    asked = [item.options for item in batch.items]
    if all([each is asked[0] for each in asked]):  # noqa: C419 - faster
        asked = asked[:1]
    options = tuple([each for each in asked if isinstance(each, Options)])
    tensor_options = tuple([each for each in asked if isinstance(each, TensorOptions)])
    slots = tuple([item.slot for item in batch.items])
    return Run(batch.id, model, slots, options, batch.size, files_among(batch.items), tensor_options)


def files_among(items: Sequence[Submission]) -> tuple[int, ...]:
    """The positions of those whose slots hold a file."""
    return tuple([position for position, item in enumerate(items) if item.refill is not None])
