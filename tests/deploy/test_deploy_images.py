"""The images: one source for all, built over a stand-in base, and the CPU's one really run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support import container
from tests.support.container import BASE, Builder
from tests.support.service_process import free_port

pytestmark = pytest.mark.xdist_group("images")

ROOT = Path(__file__).resolve().parents[2]
FLAVOURS = ("ascend", "cpu", "cuda", "cuda-slim", "dcu", "mlu", "rocm")
# Over the stand-in, these have nothing that cuda's has not, but for names and versions.
AT_NIGHT = [pytest.param(flavour, marks=pytest.mark.nightly) for flavour in ("mlu", "rocm")]
IMAGES = ROOT / "models" / "sample" / "images"
JPEG = {"Content-Type": "image/jpeg"}
WAIT_S = 300


def test_the_dockerfiles_are_what_their_one_source_writes():
    command = [sys.executable, str(ROOT / "deploy/image/dockerfiles.py"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert sorted(path.suffix[1:] for path in ROOT.glob("Dockerfile.*")) == sorted(FLAVOURS)


def test_a_base_with_a_digest_is_named_by_it(monkeypatch, tmp_path):
    from deploy.image import dockerfiles

    table = tmp_path / "digests.json"
    table.write_text(json.dumps({dockerfiles.FLAVOURS["cpu"].base: "sha256:" + "cd" * 32}))
    monkeypatch.setattr(dockerfiles, "DIGESTS", table)
    assert f"ARG BASE_IMAGE={dockerfiles.FLAVOURS['cpu'].base}@sha256:{'cd' * 32}\n" in dockerfiles.dockerfile("cpu")
    assert "@" not in dockerfiles.dockerfile("rocm").partition("\n\n")[0]


@pytest.fixture(scope="module")
def prepared() -> Iterator[tuple[Builder, Path]]:
    """With the stand-in base, and the context of a build, which are made at the same time."""
    reason = container.missing()
    if reason:
        pytest.skip(reason)
    with container.builder(Path(tempfile.mkdtemp(prefix="images-", dir=on_torchs_disk()))) as made:
        with ThreadPoolExecutor(1) as pool:
            context = pool.submit(made.make_context)
            made.make_base()
        yield made, context.result()


@pytest.fixture(scope="module")
def builder(prepared):
    return prepared[0]


def on_torchs_disk():
    """Where torch can be linked, not copied: in the folder for temporary files, else in `build`."""
    for folder in (Path(tempfile.gettempdir()), ROOT / "build"):
        folder.mkdir(exist_ok=True)
        if folder.stat().st_dev == Path(find_spec("torch").origin).stat().st_dev:
            return folder
    pytest.skip("torch lies on another disk than these sources")


@pytest.fixture(scope="module")
def context(prepared):
    return prepared[1]


@pytest.fixture(scope="module")
def image(builder, context):
    return builder.build("cpu", context, "--build-arg", "REVISION=abc123")


@pytest.fixture(scope="module")
def others(request, builder, context):
    """Build those whose tests run, two at a time."""
    flavours = [item.callspec.params["flavour"] for item in request.session.items if "stand_in" in item.name]
    with ThreadPoolExecutor(2) as pool:
        yield {each: pool.submit(builder.build, each, context, "--build-arg", "EXTRAS=") for each in flavours}
        pool.shutdown(cancel_futures=True)


def answer_of(url, image, model="resnet50"):
    return httpx.post(
        f"{url}/v1/models/{model}:predict", content=image.read_bytes(), headers=JPEG, timeout=WAIT_S
    ).raise_for_status()


@pytest.fixture
def cache(tmp_path):
    """Make a volume as an orchestrator does: only the image's user may write it."""
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.chown(folder, 10001, 0)
    return folder


def started(builder, image, cache, folder, *options):
    port = free_port()
    environment = {"ANYCHIP_HOST": "127.0.0.1", "ANYCHIP_PORT": str(port)}
    command = ["serve", "--weights", "sample", *options]
    running = container.container(builder, image, cache, command, environment, folder / "service.log")
    return running, f"http://127.0.0.1:{port}"


@pytest.mark.timeout(1800)
def test_the_image_says_what_an_orchestrator_needs(builder, image):
    config = builder.config(image)
    assert config["User"] == "10001:0"
    assert config["ExposedPorts"] == {"8000/tcp": {}}
    assert config["Volumes"] == {"/cache": {}}
    assert config["Entrypoint"] == ["/opt/anychip/libexec/entrypoint.sh"]
    assert config["Cmd"] == ["serve"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", "/opt/anychip/libexec/healthcheck.py"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == "anychip"
    assert labels["org.opencontainers.image.revision"] == "abc123"
    assert labels["org.opencontainers.image.base.name"] == BASE
    assert f'\nversion = "{labels["org.opencontainers.image.version"]}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.timeout(1800)
def test_it_answers_as_uid_10001_with_a_read_only_root_and_a_small_shared_memory(builder, image, cache, tmp_path):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    running, url = started(builder, image, cache, tmp_path, "--grpc-port", str(free_port()))
    with running as inside:
        line = inside.process.stdout.readline()  # Every image has gRPC, without which it would not start.
        assert line.startswith("anychip serves"), f"{line!r} {(tmp_path / 'service.log').read_text()}"
        found = answer_of(url, IMAGES / "classify_heart.jpg").json()
        assert found["predictions"][0]["classes"][0]["label"] == "heart"
        assert found["engine"] == "openvino"
        assert answer_of(url, IMAGES / "detect_1.jpg", "yolov8n").json()["predictions"][0]["detections"]

        everyone = [psutil.Process(inside.process.pid), *psutil.Process(inside.process.pid).children(recursive=True)]
        assert {process.uids().real for process in everyone} == {10001}
        assert len(everyone) >= 2, "a server and its worker"
        for place in ("/x", "/opt/anychip/x", "/tmp/x", "/etc/x"):
            assert "Read-only file system" in inside.run("touch", place).stderr
        size, used = inside.run("df", "--output=size,used", "-B1", "/dev/shm").stdout.split()[-2:]
        assert (int(size), int(used)) == (64 << 20, 0)
        assert inside.run("/opt/anychip/libexec/healthcheck.py").returncode == 0
        checks = inside.run("/opt/anychip/libexec/entrypoint.sh", "doctor", "--skip", "port,limits,weights")
        assert checks.returncode == 0, checks.stdout
        assert "FAIL" not in checks.stdout
        words = ("verify", "--device", "cpu", "--parts", "contract", "--out", "/cache/report")
        verified = inside.run("/opt/anychip/libexec/entrypoint.sh", *words)
        assert verified.returncode == 0, verified.stdout
        assert json.loads((cache / "report" / "anychip-report.json").read_text())["passed"]
        held = inside.run("cat", "/opt/anychip/sbom.cdx.json").stdout
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(held) is None
        assert {"torch", "fastapi", "openvino"} <= {component["name"] for component in json.loads(held)["components"]}

        inside.process.send_signal(signal.SIGTERM)
        assert inside.process.wait(60) == 0
        # Those that hear of the server's end by a closed pipe need a moment for their own.
        _, left = psutil.wait_procs(everyone, timeout=10)
        assert not [process for process in left if process.is_running() and process.status() != "zombie"]
    assert {path.name for path in cache.iterdir()} >= {"home", "tmp"}


@pytest.mark.timeout(1800)
def test_a_cache_that_it_may_not_write_is_an_error_in_one_sentence(builder, image, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    running, _ = started(builder, image, cache, tmp_path)
    with running as inside:
        assert inside.process.wait(60) == 1
    last = (tmp_path / "service.log").read_text().splitlines()[-1]
    assert last.startswith("anychip: /cache cannot be written by uid 10001, gid 0: mount a volume")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flavour", ["ascend", "cuda", "cuda-slim", "dcu", *AT_NIGHT])
def test_the_other_images_are_built_over_the_stand_in(builder, others, flavour):
    """Without the vendor's extras, which its base brings; `anychip doctor` passes while it is built."""
    image = others[flavour].result()
    assert builder.config(image)["User"] == "10001:0"
    builder("rmi", image)
