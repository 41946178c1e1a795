"""One model as the owner has it: besides what clients see, its slots in the arena and its counters.

Must not know queues or workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from app.link import ServedModel
from app.observability.metrics import Metrics, ModelMetrics
from app.observability.triton_statistics import ModelStatistics
from app.processes.arena import FreeSlots
from models import Model


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
