"""Ray Serve for real, on one node: two replicas, each with a worker of its own, behind Ray's proxy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

from anychip_hosting.asgi import create
from app.config import Settings
from tests.support.service_process import free_port, running
from tests.support.work import until

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.xdist_group("ray")

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "models" / "sample" / "images").glob("*.jpg"))
JPEG = {"Content-Type": "image/jpeg"}
SETTINGS = {
    "models": "resnet50,yolov8n",
    "weights": "sample",
    "device": "cpu",
    "engine": "eager",
    "precision": "fp32",
    "batch_sizes": "1",
    "timeout_ms": 110_000,  # Of a machine that does much else.
}
WAIT_S = 120
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: make deploy-environment installs it"
)


def predict(url, image):
    model = "resnet50" if image.stem.startswith("classify") else "yolov8n"
    return httpx.post(f"{url}/v1/models/{model}:predict", content=image.read_bytes(), headers=JPEG, timeout=WAIT_S)


class Cluster:
    def __init__(self, url, process):
        self.url = url
        self._process = psutil.Process(process.pid)

    def processes(self):
        try:
            return self._process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def replicas(self):
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words and words[0].startswith("ray::ServeReplica:anychip:anychip"):
                    found.append(process)
        return found

    def ready(self):
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.url}/v2/health/ready", timeout=10)
            return answer.status_code == 200 and len(self.replicas()) == 2
        return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    port = free_port()
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    [application] = config["applications"]
    application["args"] = {"accelerator": "CPU", "settings": {**SETTINGS, "cache_dir": str(folder / "cache")}}
    [deployment] = application["deployments"]
    deployment["autoscaling_config"] = {"min_replicas": 2, "max_replicas": 2}
    deployment.update(ray_actor_options={"num_cpus": 0.1})
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    short = f"/tmp/ray-{uuid.uuid4().hex[:8]}"  # It has sockets in it, whose names have a limit.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": short,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "OMP_WAIT_POLICY": "PASSIVE",  # Else threads of two replicas spin while they wait for each other.
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_raylet_start_wait_time_s": "300",  # Of a machine that does much else.
        "RAY_gcs_server_request_timeout_seconds": "300",
    }
    # In the background of a shell SIGINT is ignored, and children inherit that.
    command = ["env", "--default-signal=INT", str(Path(sys.executable).with_name("serve")), "run", str(path)]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output)
    made = Cluster(f"http://127.0.0.1:{port}", process)
    try:
        until(lambda: process.poll() is not None or made.ready())
        assert process.poll() is None, log.read_text()[-3000:]
        yield made
    finally:
        started = made.processes()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        finally:
            process.kill()
            process.wait()
        left = psutil.wait_procs(started, timeout=60)[1]
        for each in left:
            each.kill()
        shutil.rmtree(short, ignore_errors=True)
    assert not left, f"Ray left {left}"


@needs_ray
@pytest.mark.timeout(900)
def test_answers_are_those_of_the_plain_service(cluster, tmp_path):
    options = ("--models", SETTINGS["models"], "--weights", "sample", "--device", "cpu", "--batch-sizes", "1")
    through_ray = [predict(cluster.url, image) for image in IMAGES]
    with running(tmp_path, *options) as service:
        plain = [predict(service.url, image) for image in IMAGES]
    assert [answer.status_code for answer in through_ray] == [200] * len(IMAGES)
    assert [answer.json() for answer in through_ray] == [answer.json() for answer in plain]
    assert all(answer.headers["server-timing"] and answer.headers["x-request-id"] for answer in through_ray)


@needs_ray
@pytest.mark.timeout(900)
def test_a_replica_killed_under_load_costs_no_request(cluster):
    """What a killed replica had under way Ray answers with 500 or 503: asked again, it succeeds."""
    before = cluster.replicas()
    assert len(before) == 2
    retried = []
    halfway = threading.Event()

    def ask(number):
        image = IMAGES[number % len(IMAGES)]
        if number == 40:
            halfway.set()
        for _ in range(10):
            answer = predict(cluster.url, image)
            if answer.status_code == 200:
                return answer.json()["predictions"]
            assert answer.status_code in (500, 503), answer.text
            retried.append(answer.status_code)
        raise AssertionError(f"not even at the tenth attempt: {answer.status_code} {answer.text}")

    expected = [predict(cluster.url, image).json()["predictions"] for image in IMAGES]
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(ask, range(120))
        halfway.wait(WAIT_S)
        before[0].kill()
        assert list(answers) == [expected[number % len(IMAGES)] for number in range(120)]
    assert len(retried) <= 4 * 10
    until(lambda: len(cluster.replicas()) == 2 and before[0] not in cluster.replicas())


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, while it is imported.
def test_every_accelerator_asks_ray_for_one_and_an_unknown_one_is_refused():
    from anychip_hosting.ray_serve import build

    def options(name):
        application = build({"accelerator": name, "settings": {"models": "resnet50"}})
        return application._bound_deployment.ray_actor_options

    assert options("GPU")["num_gpus"] == 1
    assert [options(name)["resources"] for name in ("NPU", "MLU", "DCU")] == [{"NPU": 1}, {"MLU": 1}, {"DCU": 1}]
    with pytest.raises(ValueError, match="'TPU'; there is CPU, GPU"):
        build({"accelerator": "TPU"})


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, while it is imported.
def test_replicas_of_one_machine_claim_different_devices(tmp_path, monkeypatch):
    from anychip_hosting.ray_serve import claim
    from backends import BackendUnavailableError, Choice

    monkeypatch.setattr("backends.choose", lambda device: Choice(None, ("mlu:0", "mlu:1")))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (first, held), (second, other) = claim("mlu"), claim("mlu")
    assert (first, second) == ("mlu:0", "mlu:1")
    with pytest.raises(BackendUnavailableError):
        claim("mlu")
    held.close()
    again, held = claim("mlu")
    assert again == "mlu:0"
    held.close()
    other.close()


async def lifespan(application, during):
    """Start, serve and stop, as a host of ASGI applications does; return the messages' types."""
    inbox = asyncio.Queue()
    said = []

    async def send(message):
        said.append(message["type"])
        if message["type"] == "lifespan.startup.complete":
            await during()
            await inbox.put({"type": "lifespan.shutdown"})

    await inbox.put({"type": "lifespan.startup"})
    await application({"type": "lifespan"}, inbox.get, send)
    return said


async def test_any_asgi_server_can_host_it(tmp_path):
    settings = {"models": "resnet50", "weights": "sample", "device": "null", "cache_dir": tmp_path}
    application = create(Settings(**settings))
    answers = []

    async def during():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://localhost") as client:
            answers.append(await client.get("/v2/health/ready"))
            answers.append(
                await client.post("/v1/models/resnet50:predict", content=IMAGES[0].read_bytes(), headers=JPEG)
            )
            answers.append(await client.get("/v1/models", headers={"Host": "rebound.example"}))

    children = set(psutil.Process().children(recursive=True))
    said = await lifespan(application, during)
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert [answer.status_code for answer in answers] == [200, 200, 403]
    left = set(psutil.Process().children(recursive=True)) - children
    assert not [child for child in left if child.name() == "anychip-worker"]
