"""What the scheduler knows of one worker, and of what waits for it. Times are in seconds, the clock is a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic

from app.scheduling.batching import BatchLatencies
from app.scheduling.contention import early_s
from app.scheduling.queue import Batch, Queue, T

_LEARNING_RATE = 0.2
_CREDITS = 2  # One batch running, one in front of the worker.


@dataclass(slots=True)
class WorkerState(Generic[T]):
    """A worker's batches and clocks, what is known of its speed, and the queues of its models.

    `depths`: for each model, how many batches of it the device has begun at most at once.
    """

    name: str
    latencies: Mapping[str, BatchLatencies]
    queues: Mapping[str, Queue[T]]
    depths: Mapping[str, int]
    served_s: dict[str, float]
    clock_s: float = 0.0
    free_s: float = 0.0  # When all that is in flight is expected to be done.
    finished_s: float = 0.0
    prepare_s: float = 0.0  # What it does for a batch while it computes the one before.
    retiring: bool = False
    alone: bool = False  # It has an item that must be its only one.
    batches: dict[int, Batch[T]] = field(default_factory=dict)

    def turn_s(self, model: str) -> float:
        """Where the model stands on the worker's clock. One that was idle stands at now: idleness earns no credit."""
        return max(self.clock_s, self.served_s[model])

    def wait_s(self, now: float) -> float:
        """Seconds until all that is in flight is expected to be done."""
        return max(0.0, self.free_s - now) if self.batches else 0.0

    @property
    def next_at_s(self) -> float:
        """From when on it takes a batch behind the one that it computes, while several clients ask."""
        running_s = sum([self.latencies[batch.model].of(batch.size) for batch in self.batches.values()])
        return self.free_s - early_s(running_s, self.prepare_s)

    @property
    def has_credit(self) -> bool:
        """Whether another batch may be sent to it."""
        return not self.retiring and not self.alone and len(self.batches) < _CREDITS

    def takes_more(self, now: float, *, at_once: bool) -> bool:
        """Whether a batch is sent to it, which has a credit; `at_once`: one client alone asks."""
        return not self.batches or (self.is_full(now) and (at_once or now >= self.next_at_s))

    def is_full(self, now: float) -> bool:
        """Whether a full batch waits for it: nothing less goes behind another batch."""
        return any([self.queues[model].depth >= each.ceiling(now) for model, each in self.latencies.items()])  # noqa: C419 - faster

    def done_s(self, now: float) -> float:
        """When its next batch would be done: the worker with the least of these gets the next items."""
        depths = [(self.queues[model].depth, each) for model, each in self.latencies.items()]
        return self.wait_s(now) + min([each.best_s(depth, now) for depth, each in depths if depth], default=0.0)

    def sharing(self, model: str) -> int:
        """How many models have work for it, this one included."""
        if len(self.latencies) == 1:
            return 1
        return 1 + sum([other != model and bool(self.queues[other].ahead) for other in self.latencies])

    def interrupted(self) -> None:
        """It is gone, or stood still: how late the images admitted until now are says nothing of those after them."""
        for model in self.latencies:
            self.queues[model].interruptions += 1

    def learn_preparation(self, seconds: float) -> None:
        """What it did for a batch while it computed the one before."""
        self.prepare_s += _LEARNING_RATE * (seconds - self.prepare_s)

    def begun(self) -> int:
        """How many of the batches may have begun: a device of depth 2 starts one before the one before is done."""
        depths = [self.depths.get(batch.model, 1) for batch in self.batches.values()]
        begun = min(1, len(depths))
        while begun < len(depths) and min(depths[: begun + 1]) > begun:
            begun += 1
        return begun
