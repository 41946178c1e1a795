"""One model as the service serves it: the model itself, its slots in the arena, its metrics and its counters.

Must not know queues or workers.
"""

from __future__ import annotations

from typing import Any

from app.observability.metrics import Metrics, ModelMetrics
from app.observability.triton_statistics import ModelStatistics
from app.processes.arena import FreeSlots
from models import Model


class ServedModel:
    """A model and what belongs to it in the server. `index` is its pool in the arena and its position in every `Load`.

    A model of images may have a second form, which takes normalised tensors (`models.NormalisedModel`). That form is a
    served model of its own, with slots of its own; metrics, statistics and `unloaded` are those of the model it belongs
    to.
    """

    def __init__(self, index: int, model: Model, slots: int, metrics: Metrics) -> None:
        self.index = index
        self.model = model
        self.slots = FreeSlots(slots)
        self.metrics = ModelMetrics(metrics, model.name)
        self.statistics = ModelStatistics()
        self.floats: ServedModel | None = None
        """The form that takes normalised tensors, where that is enabled."""
        self.signature: tuple[Model, Any] | None = None
        """What app.protocols.open_inference computed from a model, and from which one. It is kept for each request."""
        self.unloaded = False
        """New requests are refused: no worker has the model, or the last one is about to give it up."""
        self.passes_files = False
        """Whether its workers decode files, which then go into slots in place of pixels (--decode)."""
        self.images = 0
        """Images accepted and not yet answered."""

    def add_form(self, floats: ServedModel) -> None:
        """Make `floats` the form of this model that takes normalised tensors."""
        self.floats = floats
        floats.metrics, floats.statistics = self.metrics, self.statistics

    @property
    def images_under_way(self) -> int:
        """Images accepted and not yet answered, in any form."""
        return self.images + (self.floats.images if self.floats else 0)

    @property
    def slots_taken(self) -> int:
        """Slots in use, in any form."""
        return self.slots.taken + (self.floats.slots.taken if self.floats else 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its forms in the scheduler."""
        return (self.model.name, self.floats.model.name) if self.floats else (self.model.name,)
