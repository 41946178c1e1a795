"""Triton's names for this service's metrics, for dashboards and autoscalers made for it: `--compat triton-metrics`.

Names, units (microseconds, millijoules as joules) and labels are those of triton-inference-server/server:
docs/user_guide/metrics.md. Its counters do not end in `_total`, which the exposition format requires, so they
have no declared type; `rate()` works all the same. Devices have no UUID here: `gpu_uuid` is ours, e.g. `cuda:0`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from prometheus_client import Metric
from prometheus_client.core import UnknownMetricFamily
from prometheus_client.registry import Collector

from app.access.rules import Need
from app.observability.metrics import Metrics
from app.observability.triton_statistics import of_version

router = APIRouter()
NEEDS: dict[str, dict[str, Need]] = {}

_FAILURES = {
    **dict.fromkeys(("QUEUE_FULL", "DEADLINE_UNREACHABLE", "DEADLINE_EXCEEDED", "DRAINING", "NOT_READY"), "REJECTED"),
    "CANCELLED": "CANCELED",
    "INFERENCE_FAILED": "BACKEND",
}
"""Triton's reasons of a failed request, by our codes; those of all others are "OTHER"."""
_DURATIONS = {
    "queue": "nv_inference_queue_duration_us",
    "decode": "nv_inference_compute_input_duration_us",
    "infer": "nv_inference_compute_infer_duration_us",
    "postprocess": "nv_inference_compute_output_duration_us",
}
_DEVICE = {
    "anychip_device_utilization_ratio": "nv_gpu_utilization",
    "anychip_device_power_watts": "nv_gpu_power_usage",
    "anychip_device_energy_joules_total": "nv_energy_consumption",
}
_MEMORY = {"used": "nv_gpu_memory_used_bytes", "total": "nv_gpu_memory_total_bytes"}


class TritonMetrics(Collector):
    """Collector of Triton's metrics, registered beside the others and read at every scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield every family that has values now."""
        families: dict[str, UnknownMetricFamily] = {}

        def add(name: str, value: float, **labels: str) -> None:
            family = families.setdefault(name, UnknownMetricFamily(name, f"As Triton has it; from {source}"))
            if "model" in labels:
                labels["model"], labels["version"] = of_version(labels["model"])
            family.add_sample(name, labels, value)

        failures: dict[tuple[str, str], float] = {}
        metrics = self._metrics
        per_model = (metrics.requests, metrics.request_seconds, metrics.stage_seconds, metrics.queue_depth)
        per_device = (
            metrics.batch_size,
            metrics.device_memory_bytes,
            *metrics.telemetry.values(),
            metrics.device_energy_joules,
        )
        batches: dict[str, float] = {}
        families_now = (family for each in (*per_model, *per_device) for family in each.collect())
        for sample in (sample for family in families_now for sample in family.samples):
            source, labels, value = sample.name, sample.labels, sample.value
            model = {"model": labels.get("model", "")}
            if source == "anychip_requests_total" and labels["model"]:
                for reason in {*_FAILURES.values(), "OTHER"}:
                    failures.setdefault((labels["model"], reason), 0)
                if labels["code"] == "OK":
                    add("nv_inference_request_success", value, **model)
                else:
                    key = labels["model"], _FAILURES.get(labels["code"], "OTHER")
                    failures[key] = failures.get(key, 0) + value
            elif source == "anychip_request_seconds_sum":
                add("nv_inference_request_duration_us", value * 1e6, **model)
            elif source == "anychip_stage_seconds_sum" and labels["stage"] in _DURATIONS:
                add(_DURATIONS[labels["stage"]], value * 1e6, **model)
            elif source == "anychip_stage_seconds_count" and labels["stage"] == "infer":
                add("nv_inference_count", value, **model)
            elif source == "anychip_batch_size_count":
                batches[labels["model"]] = batches.get(labels["model"], 0) + value
            elif source == "anychip_queue_depth":
                add("nv_inference_pending_request_count", value, **model)
            elif source == "anychip_device_memory_bytes" and labels["kind"] in _MEMORY:
                add(_MEMORY[labels["kind"]], value, gpu_uuid=labels["device"])
            elif source in _DEVICE:
                add(_DEVICE[source], value, gpu_uuid=labels["device"])
        source = "anychip_requests_total"
        for (name, reason), value in failures.items():
            add("nv_inference_request_failure", value, model=name, reason=reason)
        source = "anychip_batch_size"
        for name, value in batches.items():
            add("nv_inference_exec_count", value, model=name)
        yield from families.values()


collector = TritonMetrics
