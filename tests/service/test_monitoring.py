"""A real Prometheus watches real services under load, one with each fault: every alert fires where its fault is and
nowhere else, and every panel of the dashboard has something to show.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from PIL import Image

from tests.support.constants import GUARD_COOLDOWN_S, HANDOVER_INTERVAL_S, Constants
from tests.support.images import GREY, encoded
from tests.support.load import Load, until
from tests.support.null_service import is_ready, metric
from tests.support.prometheus import DEPLOY, MISSING, Prometheus, alerts, prometheus
from tests.support.service_process import ServiceProcess, running

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}

# A disk without room is a small one in memory, which only root may mount.
SMALL_DISKS = os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0

BURNING = {"AnychipErrorBudgetBurnFast", "AnychipErrorBudgetBurn", "AnychipErrorBudgetBurnSlow"}
# What must fire in which story, and what may: a killed worker's images wait for the next one, which takes seconds.
EXPECTED = {
    "steady": set(),
    "killed": {"AnychipWorkerFlapping", "AnychipOutOfMemory", "AnychipNotReady", "AnychipDown", "AnychipAbsent"},
    "overload": {*BURNING, "AnychipQueueNearLimit", "AnychipTailLatency"},
    "leak": {"AnychipMemoryLeak"},
    "lost": {"AnychipDeviceLost", "AnychipOnCpu"},
    "surprise": {"AnychipOnCpu", "AnychipPrecisionGateFailed"},
    "decoding": {"AnychipDecodeBound", *(["AnychipCacheDiskFull"] if SMALL_DISKS else [])},
    "slow": {"AnychipSlowDevice", "AnychipDeviceUnhealthy", "AnychipDeviceTooHot"},
    "pair": {"AnychipDown"},
    "failing": BURNING,
    "storm": BURNING,
}
# The ten faults of docs/runbook.md, and the story in which each of them is.
FAULTS = {
    "a slow card among four": "slow",
    "a card's software that leaks": "leak",
    "a model that fails": "failing",
    "the processor is too slow to decode": "decoding",
    "one pod of two is down": "pair",
    "the precision gate refused an engine": "surprise",
    "the service runs on the CPU by surprise": "surprise",
    "a worker dies again and again": "killed",
    "clients set deadlines that nobody can meet": "storm",
    "the disk of the cache is full": "decoding",
}
NO_STORY = {"AnychipModelsDoNotFit"}
"""Without a service that lives it: the test of the rules (deploy/prometheus/alerts_test.yml) has it fire alone."""
ALLOWED = {
    "killed": {"AnychipTailLatency", "AnychipQueueNearLimit"},
    "leak": {"AnychipTailLatency"},
    "lost": {"AnychipTailLatency", "AnychipWorkerFlapping"},
    "surprise": {"AnychipTailLatency"},
    "decoding": {"AnychipTailLatency", "AnychipQueueNearLimit"},
    "slow": {"AnychipTailLatency"},
    "pair": {"AnychipTailLatency"},
    "storm": {"AnychipTailLatency"},
}


@dataclass
class Story:
    """What Prometheus has seen; `fired`: by story, the alerts that held when its fault had come about."""

    server: Prometheus
    fired: dict[str, set[str]] = field(default_factory=dict)

    async def see(self, job: str, wanted: set[str]) -> None:
        """Note what holds, once what is wanted does and what passes has passed, or else in the end.

        Alerts wait before they fire: while a worker is replaced, some expressions hold for a moment.
        """
        possible = EXPECTED[job] | ALLOWED.get(job, set())
        with contextlib.suppress(AssertionError):
            await until(lambda: wanted <= self.server.firing(job) <= possible)
        self.fired[job] = self.fired.get(job, set()) | await asyncio.to_thread(self.server.firing, job)

    @contextlib.asynccontextmanager
    async def watched(
        self, folder: Path, job: str, model: str, *options: str, constants: Constants = MappingProxyType({})
    ) -> AsyncIterator[ServiceProcess]:
        """Start a service that is scraped, at least once before anything happens to it."""
        place = folder / job
        place.mkdir()
        common = ("--models", model, "--weights", "random", "--timeout-ms", "200000")
        starting = running(place, *common, *options, constants=constants)
        service = await asyncio.to_thread(starting.__enter__)  # It takes seconds, in which another story goes on.
        try:
            self.server.watch(job, service.url)
            await until(lambda: self.server.now(f'anychip_ready{{job="{job}"}} == 1'))
            yield service
        finally:
            self.server.forget(job)
            await asyncio.to_thread(starting.__exit__, None, None, None)


NULL = ("--device", "null", "--engine", "auto", "--precision", "auto")
RESNET = "/v1/models/resnet18:predict"


async def steady(story: Story, folder: Path) -> None:
    null = ("--null", "delay_ms=5,power_w=75")
    async with story.watched(folder, "steady", "resnet18", *NULL, *null, "--compat", "triton-metrics") as service:
        async with Load(service.url, RESNET, GREY, 4, TRACEPARENT) as load:
            await until(lambda: story.server.now('namespace_job_model:anychip_requests:rate5m{job="steady"} > 0'))
            await load.answers(100)
        assert set(load.outcomes) == {(200, "OK")}
        await story.see("steady", set())


async def killed(story: Story, folder: Path) -> None:
    null = ("--null", "delay_ms=10,power_w=75,oom=>4", "--batch-sizes", "1,2,4,8", "--grace-s", "600")
    async with story.watched(folder, "killed", "resnet18", *NULL, *null) as service:
        async with Load(service.url, RESNET, GREY, 16) as load:
            for _ in range(3):
                await until(lambda: is_ready(service))
                await load.answers(50)
                service.worker().kill()
            await until(lambda: is_ready(service))
            await load.answers(50)
            await story.see("killed", {"AnychipWorkerFlapping", "AnychipOutOfMemory"})
        service.process.send_signal(signal.SIGTERM)
        await story.see("killed", {"AnychipNotReady"})
        service.process.kill()
        await story.see("killed", {"AnychipDown"})


async def overload(story: Story, folder: Path) -> None:
    null = ("--null", "delay_ms=300", "--batch-sizes", "1", "--queue-size", "8")
    async with story.watched(folder, "overload", "resnet18", *NULL, *null) as service:
        async with Load(service.url, RESNET, GREY, 24) as load:
            await story.see("overload", EXPECTED["overload"])
        assert (429, "QUEUE_FULL") in load.outcomes


async def leak(story: Story, folder: Path) -> None:
    simulation = "npu:1,memory_mb=1024,leak_mb=8"
    options = ("--batch-sizes", "1", "--device", "npu", "--simulate", simulation, "--guard-policy", "0.3")
    constants = {GUARD_COOLDOWN_S: 0, HANDOVER_INTERVAL_S: 0}
    async with story.watched(folder, "leak", "mobilenet_v3_small", *options, constants=constants) as service:
        async with Load(service.url, "/v1/models/mobilenet_v3_small:predict", GREY, 2) as load:
            await until(lambda: metric(service, "anychip_cache_releases_total", rung="3") >= 1)
        assert set(load.outcomes) == {(200, "OK")}
        await story.see("leak", EXPECTED["leak"])


async def lost(story: Story, folder: Path) -> None:
    simulation = "mlu:1,lose=40,lacks=aten::max_pool2d_with_indices"
    options = ("--batch-sizes", "1", "--device", "mlu", "--simulate", simulation)
    async with story.watched(folder, "lost", "resnet18", *options) as service:
        async with Load(service.url, RESNET, GREY, 2) as load:
            await until(lambda: metric(service, "anychip_worker_restarts_total", reason="lost") >= 1)
        assert set(load.outcomes) == {(200, "OK")}
        await story.see("lost", EXPECTED["lost"])


async def surprise(story: Story, folder: Path) -> None:
    options = ("--device", "auto", "--precision", "bf16", "--batch-sizes", "1", "--plugins", "tests.support.wrong_bf16")
    async with story.watched(folder, "surprise", "yolov8n", *options):
        await story.see("surprise", EXPECTED["surprise"])


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a folder on a disk of 64 MB where that can be made."""
    folder.mkdir()
    if not SMALL_DISKS:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def photograph() -> bytes:
    """Build a JPEG that takes a while to decode, and does not count as large."""
    pixels = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    return encoded(Image.fromarray(pixels).resize((4000, 3000)), "JPEG")


async def decoding(story: Story, folder: Path) -> None:
    """Load one decoder beside a quick device, while the disk of the cache is full."""
    options = ("--null", "nan=#010203", "--decoders", "1", "--batch-sizes", "1,2,4,8")
    with small_disk(folder / "disk") as disk:
        async with story.watched(folder, "decoding", "resnet18", *NULL, *options, "--cache-dir", str(disk)) as service:
            async with Load(service.url, RESNET, photograph(), 16) as load:
                await load.answers(50)
                await story.see("decoding", EXPECTED["decoding"])
            assert set(load.outcomes) == {(200, "OK")}


async def slow(story: Story, folder: Path) -> None:
    """Two services of one job: one with two devices, the other with a slow one, which says that it is not well."""
    async with contextlib.AsyncExitStack() as stack:
        for number, null_device in enumerate(("devices=2,delay_ms=20,power_w=75", "delay_ms=80,power_w=75,sick=1")):
            null = ("--null", null_device, "--batch-sizes", "1")
            place = folder / str(number)
            place.mkdir()
            service = await stack.enter_async_context(story.watched(place, "slow", "resnet18", *NULL, *null))
            await stack.enter_async_context(Load(service.url, RESNET, GREY, 2))
        await story.see("slow", EXPECTED["slow"])
        for alert in EXPECTED["slow"]:
            found = story.server.now(alerts()[alert])
            assert {each["instance"] for each in found} <= {service.url.removeprefix("http://")}, alert


async def failing(story: Story, folder: Path) -> None:
    async with story.watched(folder, "failing", "resnet18", *NULL, "--null", "fail=*1") as service:
        async with Load(service.url, RESNET, GREY, 2) as load:
            await story.see("failing", EXPECTED["failing"])
        assert set(load.outcomes) == {(500, "INFERENCE_FAILED")}


async def storm(story: Story, folder: Path) -> None:
    null = ("--null", "delay_ms=100", "--batch-sizes", "1")
    async with story.watched(folder, "storm", "resnet18", *NULL, *null) as service:
        async with Load(service.url, RESNET, GREY, 4, {"X-Timeout-Ms": "50"}) as load:
            await story.see("storm", EXPECTED["storm"])
        assert {code.partition("_")[0] for _, code in load.outcomes} == {"DEADLINE"}


async def pair(story: Story, folder: Path) -> None:
    """Two services of one job, of which one is killed."""
    async with contextlib.AsyncExitStack() as stack:
        for number in range(2):
            place = folder / f"of-two-{number}"
            place.mkdir()
            service = await stack.enter_async_context(story.watched(place, "pair", "resnet18", *NULL))
        service.process.kill()
        await story.see("pair", EXPECTED["pair"])
        [down] = story.server.now(alerts()["AnychipDown"] + ' and on (job) up{job="pair"}')
        assert down["instance"] == service.url.removeprefix("http://")
        ready = next(expr for title, _, expr in asked("pair") if title == "Ready")
        await until(lambda: 0.5 in story.server.values(ready))  # The panel is looked at in steps.


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitoring")

    async def told(story: Story) -> Story:
        async def one_after_another(*chapters):
            for chapter in chapters:
                await chapter(story, folder)

        await steady(story, folder)  # By itself: nothing may be slow here.
        await asyncio.gather(
            one_after_another(killed, overload, failing, storm), one_after_another(leak, lost, surprise, pair)
        )
        # Decoding is compared with a device, and a device with others: by themselves as well.
        await one_after_another(decoding, slow)
        return story

    with prometheus(folder) as server:
        yield asyncio.run(told(Story(server)))


def test_every_alert_has_a_story():
    found = set().union(*EXPECTED.values()) | NO_STORY | (set() if SMALL_DISKS else {"AnychipCacheDiskFull"})
    assert found == set(alerts())


@pytest.mark.parametrize("alert", [*alerts()])
def test_an_alert_fires_where_its_fault_is_and_nowhere_else(story, alert):
    fired = {job for job, names in story.fired.items() if alert in names and alert not in ALLOWED.get(job, set())}
    assert fired == {job for job, names in EXPECTED.items() if alert in names}


def test_what_has_no_pause_was_firing_by_prometheus_own_account(story):
    firing = 'ALERTS{alertname="AnychipPrecisionGateFailed",alertstate="firing",model="yolov8n",precision="bf16"}'
    assert story.server.values(firing)


def asked(job=".*"):
    """Panel, number and expression of every query, as Grafana asks it with all variables at All, or of one job."""
    panels = json.loads((DEPLOY / "grafana" / "anychip.json").read_text())["panels"]
    for panel in panels:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", "20s").replace("$job", job)
            for variable in ("namespace", "model", "device", "instance"):
                expr = expr.replace(f"${variable}", ".*")
            yield panel["title"], target["refId"], expr


def expressions():
    """Every query of the dashboard, by panel."""
    for title, number, expr in asked():
        yield pytest.param(expr, id=f"{title} {number}")


def exercise():
    """Fault, alert and panels of the runbook's table."""
    page = (DEPLOY.parent / "docs" / "runbook.md").read_text().partition("## Ten faults")[2].partition("\n## ")[0]
    for fault, alert, panels in re.findall(r"^\| ([^|]+) \| `(Anychip\w+)` \| (.+) \|$", page, re.MULTILINE):
        yield pytest.param(fault, alert, re.findall(r"\*([^*]+)\*", panels), id=fault)


@pytest.mark.parametrize(("fault", "alert", "panels"), [*exercise()])
def test_on_call(story, fault, alert, panels):
    """Where the fault is the alert fires, and the panels that the runbook names have something of that service."""
    job = FAULTS[fault]
    if alert not in EXPECTED[job]:
        pytest.skip("only root may mount a small disk")
    assert alert in story.fired[job]
    by_title = {}
    for title, _, expr in asked(job):
        by_title[title] = by_title.get(title, []) + story.server.values(expr)
    assert all(any(by_title[title]) for title in panels), {title: len(by_title[title]) for title in panels}
    if job == "pair":
        assert 0.5 in by_title["Ready"]


@pytest.mark.parametrize("expression", [*expressions()])
def test_a_panel_has_data(story, expression):
    assert "$" not in expression
    assert story.server.values(expression)


def test_recording_rules_have_data(story):
    names = story.server.get("label/__name__/values")
    recorded = {
        rule["name"]
        for group in story.server.get("rules")["groups"]
        for rule in group["rules"]
        if rule["type"] == "recording"
    }
    assert recorded - set(names) == set()
    assert all(rule["health"] == "ok" for group in story.server.get("rules")["groups"] for rule in group["rules"])


def test_a_measurement_leads_to_its_trace(story):
    span = {"start": story.server.started_s, "end": story.server.started_s + 1e6}
    found = story.server.get("query_exemplars", query="anychip_request_seconds_bucket", **span)
    assert {each["labels"]["trace_id"] for series in found for each in series["exemplars"]} == {TRACE}


def test_tritons_names_are_there_where_asked_for(story):
    for name in ("request_success", "count", "exec_count", "request_duration_us", "queue_duration_us"):
        assert max(story.server.values(f'nv_inference_{name}{{job="steady",model="resnet18",version="1"}}')) > 0
    assert story.server.values('nv_gpu_power_usage{job="steady"}')
    assert not story.server.values('nv_inference_count{job="overload"}')
