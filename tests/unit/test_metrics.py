"""Counting: in sums over workers, and as clients of Prometheus and Triton read it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from anychip_compat.triton_metrics import TritonMetrics
from app.fleet.device_metrics import DeviceMetrics
from app.http.routes.status import snapshot
from app.observability.metrics import Histogram, Metrics, ModelMetrics
from app.worker.messages import Stats
from tests.support.filled_metrics import filled

NAN = math.nan


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, labels)


def stats(used=0, *, allocated=0, resident=0, joules=NAN, watts=NAN):
    said = {"utilization_ratio": 0.5, "power_watts": watts, "energy_joules": joules}
    known = {name: figure for name, figure in said.items() if not math.isnan(figure)}
    return Stats(allocated, allocated, used, 1000, resident, known)


def test_memory_of_a_device_is_that_of_all_its_workers_and_used_is_the_devices_own():
    metrics = Metrics()
    device = DeviceMetrics(metrics, "npu:0", "ascend")

    def memory(kind):
        return value(metrics, "anychip_device_memory_bytes", device="npu:0", vendor="ascend", kind=kind)

    device.ready()
    device.report("one", stats(300, allocated=100, resident=7))
    device.report("two", stats(310, allocated=50, resident=8))
    assert (memory("allocated"), memory("used"), memory("total")) == (150, 310, 1000)
    assert value(metrics, "anychip_worker_resident_bytes", device="npu:0") == 15
    device.gone("one", last=False)
    device.report("two", stats(200, allocated=50, resident=8))
    assert (memory("allocated"), memory("used")) == (50, 200)
    assert value(metrics, "anychip_worker_up", device="npu:0") == 1
    device.gone("two", last=True)
    assert math.isnan(memory("used"))
    assert memory("total") == 1000
    assert value(metrics, "anychip_worker_up", device="npu:0") == 0
    assert math.isnan(value(metrics, "anychip_device_utilization_ratio", device="npu:0", vendor="ascend"))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_energy_counts_on_when_a_worker_begins_anew(readings):
    """Whatever the device's counters say: what is shown never falls, and of one worker it is the whole difference."""
    metrics = Metrics()
    device = DeviceMetrics(metrics, "npu:0", "ascend")
    shown = [0.0]
    for reading in sorted(readings):
        device.report("one", stats(joules=reading))
        shown.append(value(metrics, "anychip_device_energy_joules_total", device="npu:0", vendor="ascend"))
    assert shown == sorted(shown)
    assert shown[-1] == pytest.approx(max(readings) - min(readings), rel=1e-9, abs=1e-6)
    device.gone("one", last=True)
    device.report("two", stats(joules=0))
    device.report("two", stats(joules=5))
    assert value(metrics, "anychip_device_energy_joules_total", device="npu:0", vendor="ascend") == pytest.approx(
        shown[-1] + 5
    )


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), max_size=30))
def test_histograms_say_what_prometheus_own_client_would(amounts):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bounds = (0.001, 0.5, 1, 10)
    series = Histogram("h", "text", ["a"], buckets=bounds, registry=ours).labels("x")
    other = prometheus_client.Histogram("h", "text", ["a"], buckets=bounds, registry=theirs).labels("x")
    for amount in (*amounts, *bounds):
        series.observe(amount)
        other.observe(amount)
    said = [
        {(sample.name, *sample.labels.items()): sample.value for family in each.collect() for sample in family.samples}
        for each in (ours, theirs)
    ]
    assert said[0] == pytest.approx(said[1])
    assert said[0].keys() == said[1].keys()


@pytest.mark.parametrize(("name", "version"), [("m", "1"), ("m@2", "2")])
def test_tritons_names_add_up(name, version):
    metrics = Metrics()
    metrics.registry.register(TritonMetrics(metrics))
    model = ModelMetrics(metrics, name)
    for code in ("OK", "OK", "DEADLINE_EXCEEDED", "CANCELLED", "INFERENCE_FAILED", "INVALID_IMAGE"):
        model.answered(code, 0.5, None)
    model.batch("npu:0")[0].observe(2)
    model.stage_seconds["infer"].observe(0.25)
    DeviceMetrics(metrics, "npu:0", "ascend").report("w", stats(7, watts=90))
    labels = {"model": "m", "version": version}
    assert value(metrics, "nv_inference_request_success", **labels) == 2
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert value(metrics, "nv_inference_request_failure", **labels, reason=reason) == 1
    assert value(metrics, "nv_inference_exec_count", **labels) == 1
    assert value(metrics, "nv_inference_count", **labels) == 1
    assert value(metrics, "nv_inference_compute_infer_duration_us", **labels) == 250_000
    # As Triton has it, of the two that succeeded.
    assert value(metrics, "nv_inference_request_duration_us", **labels) == 1_000_000
    assert value(metrics, "nv_gpu_power_usage", gpu_uuid="npu:0") == 90
    assert value(metrics, "nv_gpu_memory_used_bytes", gpu_uuid="npu:0") == 7


def test_stats_are_rows_of_the_table_by_their_names_and_forms():
    metrics = filled()
    metrics.rejected.labels("m", "deadline").inc(3)
    metrics.cache_releases.labels("npu:0", "2", "device").inc()
    metrics.cache_releases.labels("npu:0", "2", "cache").inc()
    metrics.device_memory_bytes.labels("npu:0", "ascend", "used").set(math.nan)
    state = SimpleNamespace(is_ready=True)
    devices = SimpleNamespace(devices=[SimpleNamespace(device=name, vendor="ascend") for name in ("npu:0", "npu:1")])
    administration = SimpleNamespace(
        workers=lambda: ["npu:0"],
        state=lambda _: (state, ""),
        why_not=lambda: "",
        devices=lambda: devices,
        shadows=list,
    )
    link = SimpleNamespace(metrics=metrics, administration=administration, simulated=True, models=["m"])
    found = snapshot(link).model_dump()
    [model], (used, unused) = found["models"], found["devices"]
    assert model["requests"] == {"OK": 1}
    assert model["rejected"] == {"deadline": 3}
    assert (model["images"], model["images_computed"], model["batches"], model["retried"]) == (1, 3, 1, 0)
    assert (model["request_seconds"]["count"], model["request_seconds"]["buckets"]["+Inf"]) == (1, 1)
    assert (used["up"], used["images"], used["power_watts"], used["cache_releases"]) == (True, 3, 1, {"2": 2})
    assert used["memory_bytes"] == {"allocated": 1, "reserved": 2, "used": None, "total": 4}
    assert (unused["up"], unused["images"], unused["power_watts"], unused["restarts"]) == (False, 0, None, {})
    assert unused["throttled"] == {"heat": None, "power": None}
