"""Records of the owner: each model with its slots and counters, and each of its items until its one reply.

Owns: these records. Must not know what fills a slot, nor which request an item is of; nor workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from app import logs
from app.decoding.waiting import PendingImage
from app.link import Reply, ServedModel, Terms
from app.observability.metrics import Metrics, ModelMetrics
from app.observability.triton_statistics import ModelStatistics
from app.processes.arena import FreeSlots
from app.scheduling.queue import ENDED, Item
from models import Model, Options, Placement, TensorOptions

NOWHERE = Placement(0, 0)
"""Placement of a row of tensors."""


class ModelPool(ServedModel):
    """A model with its slots. `index` is also its pool in the arena and its position in every `Load`."""

    def __init__(self, index: int, model: Model, slots: int, metrics: Metrics) -> None:
        super().__init__(index, model, ModelMetrics(metrics, model.name), ModelStatistics())
        self.slots = FreeSlots(slots)
        self.forms = [self]
        """This form and the model's other one, each with slots and a queue of its own."""
        self.shown = self
        """Model that clients see: this one, or the one whose form this is. They are loaded and unloaded together."""
        self.unloaded = False
        """Flag of a model whose new requests are refused: no worker has it, or the last one is about to unload it."""
        self.lost = ""
        """Why its files cannot be read any more, if that is why it is unloaded."""
        self.passes_files = False
        """Flag of a model whose workers decode files, which then go into slots in place of pixels (--decode)."""
        self.images = 0
        """Images accepted and not yet answered."""
        self.watchers: set[asyncio.Event] = set()
        """Events that are set whenever a request of any form has ended."""

    def add_form(self, floats: ModelPool) -> None:
        """Make `floats` the form of this model that takes normalised tensors."""
        self.floats, floats.shown = floats, self
        self.forms.append(floats)
        floats.metrics, floats.statistics, floats.watchers = self.metrics, self.statistics, self.watchers

    async def drained(self) -> None:
        """Wait until no accepted image, in any form, waits for its answer."""
        ended = asyncio.Event()
        self.watchers.add(ended)
        try:
            while self.images_under_way:
                ended.clear()
                await ended.wait()
        finally:
            self.watchers.discard(ended)

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
    """An item of a model's queue. `ended`: callback for its one reply; `image`: what decoders have of it while its slot
    is filled; `refill`: fills the slot with pixels if it holds a file; `request_id`: for the log. Seconds are of
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
        """Give the slot back: no process looks at it any more."""
        self.pool.slots.give(self.slot)
