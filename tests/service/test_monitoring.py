"""A real Prometheus watches real services under load, one with each fault: every alert fires where its fault is and
nowhere else, and every panel of the dashboard has something to show. And its own checker looks at what is shipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.support.constants import GUARD_COOLDOWN_S, HANDOVER_INTERVAL_S, Constants
from tests.support.filled_metrics import filled
from tests.support.images import GREY
from tests.support.load import Load, until
from tests.support.null_service import is_ready, metric
from tests.support.prometheus import DEPLOY, MISSING, RULES, Prometheus, alerts, prometheus
from tests.support.service_process import ServiceProcess, running

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


BURNING = {"AnychipErrorBudgetBurnFast", "AnychipErrorBudgetBurn", "AnychipErrorBudgetBurnSlow"}
# What must fire in which story, and what may: a killed worker's images wait for the next one, which takes seconds.
EXPECTED = {
    "steady": set(),
    "killed": {"AnychipWorkerFlapping", "AnychipOutOfMemory", "AnychipNotReady", "AnychipDown", "AnychipAbsent"},
    "overload": {*BURNING, "AnychipQueueNearLimit", "AnychipTailLatency"},
    "leak": {"AnychipMemoryLeak"},
    "lost": {"AnychipDeviceLost", "AnychipOnCpu"},
    "surprise": {"AnychipOnCpu", "AnychipPrecisionGateFailed"},
    "slow": {"AnychipSlowDevice", "AnychipDeviceUnhealthy", "AnychipDeviceTooHot"},
}

NO_STORY = {"AnychipModelsDoNotFit", "AnychipCacheDiskFull", "AnychipDecodeBound"}
"""Without a service that lives it: the test of the rules (deploy/prometheus/alerts_test.yml) has it fire alone."""
ALLOWED = {
    "killed": {"AnychipTailLatency", "AnychipQueueNearLimit"},
    "leak": {"AnychipTailLatency"},
    "lost": {"AnychipTailLatency", "AnychipWorkerFlapping"},
    "surprise": {"AnychipTailLatency"},
    "slow": {"AnychipTailLatency"},
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
        async with Load(service.url, RESNET, GREY, 4) as load:
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
        with contextlib.suppress(AssertionError):  # An alert may hold before what a panel shows was scraped twice.
            await until(lambda: all(story.server.values(each) for each in expressions().values()))


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitoring")

    async def told(story: Story) -> Story:
        async def one_after_another(*chapters):
            for chapter in chapters:
                await chapter(story, folder)

        await steady(story, folder)  # By itself: nothing may be slow here.
        await asyncio.gather(one_after_another(killed, overload), one_after_another(leak, lost, surprise))
        await slow(story, folder)  # A device is compared with others: by itself as well.
        return story

    with prometheus(folder) as server:
        yield asyncio.run(told(Story(server)))


def test_every_alert_has_a_story():
    found = set().union(*EXPECTED.values()) | NO_STORY
    assert found == set(alerts())


@pytest.mark.parametrize("alert", [*alerts()])
def test_an_alert_fires_where_its_fault_is_and_nowhere_else(story, alert):
    fired = {job for job, names in story.fired.items() if alert in names and alert not in ALLOWED.get(job, set())}
    assert fired == {job for job, names in EXPECTED.items() if alert in names}


def expressions() -> dict[str, str]:
    """Return every query of the dashboard, by panel, as Grafana asks it with all variables at All."""
    found = {}
    for panel in json.loads((DEPLOY / "grafana" / "anychip.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", "20s")
            for variable in ("job", "namespace", "model", "device", "instance"):
                expr = expr.replace(f"${variable}", ".*")
            found[f"{panel['id']} {panel['title']} {target['refId']}"] = expr
    return found


@pytest.mark.parametrize("expression", expressions().values(), ids=expressions())
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


def test_tritons_names_are_there_where_asked_for(story):
    for name in ("request_success", "count", "exec_count", "request_duration_us", "queue_duration_us"):
        assert max(story.server.values(f'nv_inference_{name}{{job="steady",model="resnet18",version="1"}}')) > 0
    assert story.server.values('nv_gpu_power_usage{job="steady"}')
    assert not story.server.values('nv_inference_count{job="overload"}')


def check(*arguments, **options):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_configuration_and_its_rules_are_valid():
    assert "alerts.yml" in check("check", "config", RULES / "prometheus.yml")  # It reads the rules, too.


def test_every_alert_passes_its_unit_tests():
    assert "SUCCESS" in check("test", "rules", *RULES.glob("*_test.yml"))


def test_names_help_and_types_are_as_prometheus_wants_them():
    content, kind = filled().render("text/plain")
    assert "version=0.0.4" in kind or "version=1.0.0" in kind
    assert check("check", "metrics", input=content.decode()) == ""
