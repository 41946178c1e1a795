"""Statistics for Triton's tools: requests, images and batches of a model, and the seconds of each stage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from app.core import Count, Seconds

FIRST_VERSION = "1"
"""Version of a model whose name has none: `dogs` is version 1 of dogs, and `dogs@2` version 2."""

_NS = 1e9
STAGES = {"decode": "compute_input", "queue": "queue", "infer": "compute_infer", "postprocess": "compute_output"}
"""Stages by our names, with Triton's."""


def of_version(name: str) -> tuple[str, str]:
    """Return a model's name for clients, and its version."""
    shown, _, version = name.partition("@")
    return shown, version or FIRST_VERSION


@dataclass(slots=True)
class Duration:
    """Number of events, and their seconds in all."""

    count: Count = 0
    seconds: Seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one more event."""
        self.count += 1
        self.seconds += seconds

    def as_json(self) -> dict[str, int]:
        """Return Triton's form."""
        return {"count": self.count, "ns": round(self.seconds * _NS)}


@dataclass(slots=True)
class ModelStatistics:
    """Statistics of one model."""

    last_ms: Count = 0
    success: Duration = field(default_factory=Duration)
    failure: Duration = field(default_factory=Duration)
    images: Count = 0
    stages: dict[str, Seconds] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))  # Of successful requests.
    batches: dict[int, Duration] = field(default_factory=dict)  # By images in the batch; seconds on the device.

    def request(self, code: str, seconds: float, stages: Mapping[str, float]) -> None:
        """Count an ended request, with "OK" or an error's code; `stages`: the seconds of each, of its slowest image."""
        if code == "OK":
            self.success.add(seconds)
            for stage, taken in stages.items():
                self.stages[stage] += taken
            self.last_ms = int(time.time() * 1e3)
        else:
            self.failure.add(seconds)

    def batch(self, images: int, seconds: float) -> None:
        """Count a computed batch."""
        self.batches.setdefault(images, Duration()).add(seconds)

    def taken(self) -> ModelStatistics:
        """Return all counts, and start from zero."""
        taken = replace(self)
        self.__init__()  # type: ignore[misc]
        return taken

    def add(self, more: ModelStatistics) -> None:
        """Add the counts of another process for the same model."""
        self.last_ms = max(self.last_ms, more.last_ms)
        self.images += more.images
        for own, other in ((self.success, more.success), (self.failure, more.failure)):
            own.count += other.count
            own.seconds += other.seconds
        for stage in STAGES:
            self.stages[stage] += more.stages[stage]

    def as_json(self, name: str) -> dict[str, Any]:
        """Return one entry of "model_stats"."""
        nothing = Duration().as_json()
        shown, version = of_version(name)
        good = self.success.count  # Every stage of a request counts once, however many images it has (infer_stats.cc).
        return {
            "name": shown,
            "version": version,
            "last_inference": self.last_ms,
            "inference_count": self.images,
            "execution_count": sum(duration.count for duration in self.batches.values()),
            "inference_stats": {
                "success": self.success.as_json(),
                "fail": self.failure.as_json(),
                **{theirs: Duration(good, self.stages[ours]).as_json() for ours, theirs in STAGES.items()},
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    # Work for an image is counted above, not for a batch.
                    "compute_input": nothing,
                    "compute_infer": duration.as_json(),
                    "compute_output": nothing,
                }
                for size, duration in sorted(self.batches.items())
            ],
            "memory_usage": [],
            "response_stats": {},
        }
