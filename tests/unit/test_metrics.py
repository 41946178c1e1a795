"""Counting: from the start, in sums over workers, off the loop, and not at all where it is switched off."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import httpx
import prometheus_client
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from anychip_compat.triton_metrics import TritonMetrics
from app.fleet.device_metrics import HANDOVERS, RESTARTS, DeviceMetrics
from app.http.routes import status
from app.http.routes.stats import snapshot
from app.observability.histogram import Histogram
from app.observability.metrics import CODES, LIFE, MODELLESS, REJECTIONS, Metrics, ModelMetrics
from app.worker.messages import Released, Stats
from tests.support.filled_metrics import filled

NAN = math.nan


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, labels)


def stats(used=0, *, allocated=0, resident=0, joules=NAN, watts=NAN):
    said = {"utilization_ratio": 0.5, "power_watts": watts, "energy_joules": joules}
    known = {name: figure for name, figure in said.items() if not math.isnan(figure)}
    return Stats(allocated, allocated, used, 1000, resident, known)


def test_counters_that_can_be_known_begin_at_zero():
    metrics = Metrics()
    ModelMetrics(metrics, "m")
    DeviceMetrics(metrics, "npu:0", "ascend")
    for code in CODES:
        assert value(metrics, "anychip_requests_total", model="" if code in MODELLESS else "m", code=code) == 0
    for reason in REJECTIONS:
        assert value(metrics, "anychip_rejected_total", model="m", reason=reason) == 0
    for stage in LIFE:
        assert value(metrics, "anychip_stage_seconds_count", model="m", stage=stage) == 0
    for reason in RESTARTS:
        assert value(metrics, "anychip_worker_restarts_total", device="npu:0", reason=reason) == 0
    for reason in HANDOVERS:
        assert value(metrics, "anychip_handovers_total", device="npu:0", reason=reason) == 0
    assert value(metrics, "anychip_cache_releases_total", device="npu:0", rung="3", trigger="device") == 0


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


def test_a_device_that_does_not_know_its_energy_has_no_counter_of_it():
    metrics = Metrics()
    DeviceMetrics(metrics, "npu:0", "ascend").report("one", stats())
    assert value(metrics, "anychip_device_energy_joules_total", device="npu:0", vendor="ascend") is None
    assert math.isnan(value(metrics, "anychip_device_power_watts", device="npu:0", vendor="ascend"))


def test_releases_count_rungs_and_their_bytes():
    metrics = Metrics()
    DeviceMetrics(metrics, "npu:0", "ascend").released(Released("cache", {1: 10, 2: 500}, {1: 0, 2: 70}))
    assert value(metrics, "anychip_cache_releases_total", device="npu:0", rung="2", trigger="cache") == 1
    assert value(metrics, "anychip_cache_released_bytes_total", device="npu:0", rung="2") == 500
    assert value(metrics, "anychip_cache_released_host_bytes_total", device="npu:0", rung="1") == 0
    assert value(metrics, "anychip_cache_released_host_bytes_total", device="npu:0", rung="2") == 70


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


def test_an_exemplar_is_in_openmetrics_and_not_in_the_text_format():
    metrics = Metrics()
    ModelMetrics(metrics, "m").answered("OK", 0.02, {"trace_id": "4bf92f35"})
    text, kind = metrics.render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert '# {trace_id="4bf92f35"} 0.02' in text.decode()
    text, kind = metrics.render("text/plain")
    assert kind.startswith("text/plain")
    assert "4bf92f35" not in text.decode()
    assert list(text_string_to_metric_families(text.decode()))


@pytest.mark.parametrize("version", ["abc", "1.x", "1.0.x"])
def test_a_version_that_is_none_is_the_clients_mistake(version):
    with pytest.raises(ValueError, match="version"):
        Metrics().render(f"application/openmetrics-text; version={version}")


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


async def test_a_scrape_is_rendered_off_the_event_loop():
    threads = []

    class Watched:
        def render(self, _accept):
            threads.append(threading.get_ident())
            return b"", "text/plain"

    app = FastAPI()
    app.include_router(status.router)
    app.state.link = SimpleNamespace(metrics=Watched())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        assert (await client.get("/metrics")).status_code == 200
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_a_device_says_which_card_it_is_and_the_cache_how_much_room_it_has(tmp_path):
    from types import SimpleNamespace

    from app.observability.surroundings import show_surroundings
    from backends.contract.backend import Device

    metrics = Metrics()
    found = (
        Device("cuda:0", "H100", 1, "fp16", {"uuid": "GPU-1", "pci": "0000:17:00.0"}),
        Device("cuda:1", "H100", 1, "fp16"),
    )
    choice = SimpleNamespace(found=found, devices=("cuda:0",), vendor="nvidia")
    show_surroundings(metrics, choice, tmp_path / "not" / "made" / "yet")
    samples = {s.name: s for f in metrics.registry.collect() for s in f.samples if s.name.startswith("anychip_")}
    assert samples["anychip_device_info"].labels == {
        "device": "cuda:0",
        "vendor": "nvidia",
        "name": "H100",
        "uuid": "GPU-1",
        "pci": "0000:17:00.0",
    }
    assert samples["anychip_cache_dir_free_bytes"].value > 0


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("cpu.stat", "usage_usec 5\nnr_throttled 3\nthrottled_usec 1500000\n"),
        ("cpu/cpu.stat", "nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000\n"),
    ],
    ids=["version-2", "version-1"],
)
def test_a_processor_limit_shows_how_long_it_held_the_service_up(tmp_path, file, text):
    from app.observability.throttling import Throttling

    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    [family] = Throttling(tmp_path).collect()
    assert [(sample.name, sample.value) for sample in family.samples] == [("anychip_cpu_throttled_seconds_total", 1.5)]
    [nothing] = Throttling(tmp_path / "elsewhere").collect()
    assert [sample.value for sample in nothing.samples] == [0]


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
