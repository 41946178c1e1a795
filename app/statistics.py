"""What Triton's tools count: requests, images and batches of a model with the time each stage took, since the start.

Owns: the counters, their JSON form (Triton's statistics extension) and their Prometheus names (`nv_inference_*`). Must
not decide anything. The service's own metrics are in app.metrics; these exist for clients and dashboards of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

VERSION = "1"
"""Models have one version: what is loaded. Loading again replaces it."""

_NS = 1e9
STAGES = {"decode": "compute_input", "queue": "queue", "infer": "compute_infer", "postprocess": "compute_output"}
"""Ours, and what Triton calls them."""

_REASONS = {
    "QUEUE_FULL": "REJECTED",
    "DEADLINE_UNREACHABLE": "REJECTED",
    "DEADLINE_EXCEEDED": "REJECTED",
    "DRAINING": "REJECTED",
    "NOT_READY": "REJECTED",
    "CANCELLED": "CANCELED",
    "INFERENCE_FAILED": "BACKEND",
}


@dataclass(slots=True)
class Duration:
    """How often, and seconds in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Once more."""
        self.count += 1
        self.seconds += seconds

    def as_json(self) -> dict[str, int]:
        """As Triton writes it."""
        return {"count": self.count, "ns": round(self.seconds * _NS)}


@dataclass(slots=True)
class Statistics:
    """Of one model."""

    last_ms: int = 0
    success: Duration = field(default_factory=Duration)
    failure: dict[str, Duration] = field(default_factory=dict)  # By Triton's reason.
    images: int = 0
    stages: dict[str, Duration] = field(default_factory=lambda: {stage: Duration() for stage in STAGES})
    batches: dict[int, Duration] = field(default_factory=dict)  # By images in the batch; seconds on the device.

    def request(self, code: str, seconds: float) -> None:
        """A request has ended, with "OK" or an error's code."""
        if code == "OK":
            self.success.add(seconds)
            self.last_ms = int(time.time() * 1e3)
        else:
            self.failure.setdefault(_REASONS.get(code, "OTHER"), Duration()).add(seconds)

    def image(self, seconds: Mapping[str, float]) -> None:
        """An image was answered, after so many seconds in each stage."""
        self.images += 1
        for stage, taken in seconds.items():
            self.stages[stage].add(taken)

    def batch(self, images: int, seconds: float) -> None:
        """A batch was computed."""
        self.batches.setdefault(images, Duration()).add(seconds)

    @property
    def executions(self) -> int:
        """Batches computed."""
        return sum(duration.count for duration in self.batches.values())

    def as_json(self, name: str) -> dict[str, Any]:
        """One entry of "model_stats"."""
        failed = Duration(
            sum(each.count for each in self.failure.values()), sum(each.seconds for each in self.failure.values())
        )
        nothing = Duration().as_json()
        return {
            "name": name,
            "version": VERSION,
            "last_inference": self.last_ms,
            "inference_count": self.images,
            "execution_count": self.executions,
            "inference_stats": {
                "success": self.success.as_json(),
                "fail": failed.as_json(),
                **{theirs: self.stages[ours].as_json() for ours, theirs in STAGES.items()},
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    # What is done for an image is not done for a batch here; it is counted above.
                    "compute_input": nothing,
                    "compute_infer": duration.as_json(),
                    "compute_output": nothing,
                }
                for size, duration in sorted(self.batches.items())
            ],
            "memory_usage": [],
            "response_stats": {},
        }


class TritonMetrics(Collector):
    """Triton's names for these counters, so that dashboards and autoscalers made for it go on working."""

    def __init__(self, models: Mapping[str, Statistics], pending: Callable[[str], int]) -> None:
        """`models`: by name; `pending`: images of a model that wait."""
        self._models, self._pending = models, pending

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: the registry need not collect to know the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """As of now. Labels and units are Triton's: microseconds."""
        # Of no stated type: a counter's name would have to end with _total, and Triton's do not.
        labels = ["model", "version"]

        def counter(name: str, text: str, value: Callable[[Statistics], float]) -> Metric:
            family = UnknownMetricFamily(f"nv_inference_{name}", text, labels=labels)
            for model, statistics in self._models.items():
                family.add_metric([model, VERSION], value(statistics))
            return family

        yield counter("request_success", "Requests answered", lambda each: each.success.count)
        failed = UnknownMetricFamily(
            "nv_inference_request_failure", "Requests not answered", labels=[*labels, "reason"]
        )
        for model, statistics in self._models.items():
            for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
                count = statistics.failure.get(reason, Duration()).count
                failed.add_metric([model, VERSION, reason], count)
        yield failed
        yield counter("count", "Images answered", lambda each: each.images)
        yield counter("exec_count", "Batches computed", lambda each: each.executions)
        yield counter(
            "request_duration_us", "Time of answered requests", lambda each: round(each.success.seconds * 1e6)
        )
        for ours, theirs in STAGES.items():
            yield counter(
                f"{theirs}_duration_us",
                f"Time images spent in the stage {ours}",
                lambda each, stage=ours: round(each.stages[stage].seconds * 1e6),  # type: ignore[misc]
            )
        waiting = GaugeMetricFamily("nv_inference_pending_request_count", "Images that wait", labels=labels)
        for model in self._models:
            waiting.add_metric([model, VERSION], self._pending(model))
        yield waiting
