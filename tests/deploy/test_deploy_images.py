"""The images: one form for all, which hadolint accepts; built over a stand-in base, and the CPU's one really run.

What only a vendor's base has (its torch, its compilers) is not there: those images are built as far as that goes.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support import container
from tests.support.container import BASE, Builder
from tests.support.hub import say, serving
from tests.support.service_process import free_port

pytestmark = pytest.mark.xdist_group("images")

ROOT = Path(__file__).resolve().parents[2]
FLAVOURS = ("ascend", "cpu", "cuda", "cuda-slim", "dcu", "mlu", "rocm")
IMAGES = ROOT / "models" / "sample" / "images"
JPEG = {"Content-Type": "image/jpeg"}
WAIT_S = 300


def version():
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def text(flavour):
    return (ROOT / f"Dockerfile.{flavour}").read_text()


def test_the_dockerfiles_are_what_their_one_source_writes():
    command = [sys.executable, str(ROOT / "deploy/image/dockerfiles.py"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert sorted(path.suffix[1:] for path in ROOT.glob("Dockerfile.*")) == sorted(FLAVOURS)


def test_what_the_owner_decides_is_written_once_and_said_by_images_chart_and_plugins(monkeypatch, tmp_path):
    from deploy import install
    from deploy.helm import sync
    from deploy.image import dockerfiles

    project = dockerfiles.read_project()
    decided = {
        **project,
        "license": "Apache-2.0",
        "authors": [{"name": "A", "email": "a@example.com"}],
        "urls": {"Homepage": "https://example.com", "Source": "https://example.com/git"},
    }
    assert dockerfiles.published(project) == {}
    monkeypatch.setattr(dockerfiles, "read_project", lambda: decided)
    text = dockerfiles.dockerfile("cpu")
    for line in ('licenses="Apache-2.0"', 'authors="A a@example.com"', 'source="https://example.com/git"'):
        assert text.count(f"      org.opencontainers.image.{line} \\\n") == 1
    chart = sync.about(decided)
    assert (
        "  artifacthub.io/license: Apache-2.0\nhome: https://example.com\nsources: [https://example.com/git]\n" in chart
    )
    assert chart.startswith(sync.about(project))
    said = 'license = "Apache-2.0"\nauthors = [{name = "A"}]\n\n[project.urls]\nHomepage = "https://example.com"\n\n[tool.x]\n'
    hosting = ROOT / "plugins" / "hosting"
    written = sync.plugin((hosting / "pyproject.toml").read_text(), said)
    (tmp_path / "pyproject.toml").write_text(written)
    assert install.read_project(tmp_path) == install.read_project(hosting) | {
        "license": "Apache-2.0",
        "authors": [{"name": "A"}],
        "urls": {"Homepage": "https://example.com"},
    }
    assert sync.plugin(written, said) == written


def test_every_package_comes_into_an_image():
    project = (ROOT / "pyproject.toml").read_text()
    where, include = (re.search(rf"^{key} = \[(.*)\]", project, re.MULTILINE)[1] for key in ("where", "include"))
    folders = [ROOT / each for each in re.findall(r'"([\w./]+)"', where)]
    packages = {folder / name for name in re.findall(r'"(\w+)\*"', include) for folder in folders}
    brought = {each.relative_to(ROOT).parts[0] for each in packages if each.is_dir()}
    assert {"app", "models", "backends", "plugins"} < brought
    assert [name for name in brought if f"!{name}\n" not in (ROOT / ".dockerignore").read_text()] == []


def test_bake_builds_every_dockerfile_under_the_name_that_is_pulled():
    bake = (ROOT / "docker-bake.hcl").read_text()
    targets = dict(re.findall(r'^target "([\w-]+)" \{\n(.*?)^\}', bake, re.MULTILINE | re.DOTALL))
    assert targets.keys() - {"common"} == set(FLAVOURS)
    for flavour in FLAVOURS:
        assert f'dockerfile = "Dockerfile.{flavour}"' in targets[flavour]
        assert f'tags = ["${{IMAGE}}:${{VERSION}}-{flavour}"]' in targets[flavour]
    for flavour in ("cpu", "cuda", "ascend"):
        assert '"linux/arm64"' in targets[flavour], "Kunpeng, Grace, Graviton"
    assert f'variable "VERSION" {{ default = "{version()}" }}' in bake


class Registry:
    """A registry with one image, whose manifests want a token that its own service gives to anybody."""

    url = ""

    def answer(self, request):
        if request.command == "GET":
            asked = "scope=repository%3Avision%2Fbase%3Apull" in request.path
            say(request, '{"token": "anonymous"}' if asked else "{}", "application/json")
            return
        if request.headers.get("Authorization") != "Bearer anonymous":
            request.send_response(401)
            challenge = f'Bearer realm="{self.url}/token",service="here",scope="repository:vision/base:pull"'
            request.send_header("WWW-Authenticate", challenge)
        elif request.path == "/v2/vision/base/manifests/1.0" and "image.index" in request.headers["Accept"]:
            request.send_response(200)
            request.send_header("Docker-Content-Digest", "sha256:" + "ab" * 32)
        else:
            request.send_response(404)
        request.end_headers()


def test_a_digest_is_asked_of_a_registry_that_wants_a_token():
    from deploy.image.digests import DigestError, digest_of, split

    assert split("python:3.12-slim") == ("registry-1.docker.io", "library/python", "3.12-slim")
    assert split("rocm/pytorch:7") == ("registry-1.docker.io", "rocm/pytorch", "7")
    assert split("harbor.example:5443/dcu/pytorch:2") == ("harbor.example:5443", "dcu/pytorch", "2")
    with serving(Registry()) as registry:
        image = f"{registry.url.removeprefix('http://')}/vision/base"
        assert digest_of(f"{image}:1.0", scheme="http") == "sha256:" + "ab" * 32
        with pytest.raises(DigestError, match="404"):
            digest_of(f"{image}:2.0", scheme="http")


def test_a_base_with_a_digest_is_named_by_it(monkeypatch, tmp_path):
    from deploy.image import dockerfiles

    table = tmp_path / "digests.json"
    table.write_text(json.dumps({dockerfiles.FLAVOURS["cpu"].base: "sha256:" + "cd" * 32}))
    monkeypatch.setattr(dockerfiles, "DIGESTS", table)
    assert f"ARG BASE_IMAGE={dockerfiles.FLAVOURS['cpu'].base}@sha256:{'cd' * 32}\n" in dockerfiles.dockerfile("cpu")
    assert "@" not in dockerfiles.dockerfile("rocm").partition("\n\n")[0]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_edit_of_the_sources_leaves_the_layer_of_the_dependencies_as_it_is(flavour):
    """What that stage copies is not what people edit; the image takes it and the sources in two steps."""
    stage, code, final = re.split(r"^FROM .*$", text(flavour), flags=re.MULTILINE)[1:]
    copied = {word for line in re.findall(r"^COPY (.+)$", stage, re.MULTILINE) for word in line.split()[:-1]}
    settings = {"pyproject.toml", "constraints.txt"}
    settings |= {f"plugins/{name}/pyproject.toml" for name in ("ascend", "grpc", "hosting")}
    hashes = f"deploy/image/hashes/{flavour}.txt"  # Where the image has a list of them.
    settings |= {hashes} & copied
    assert (hashes in copied) == (ROOT / hashes).exists()
    assert copied == {
        *settings,
        "deploy/install.py",
        "deploy/image/build.sh",
        "backends/vendors/drivers.py",
        "backends/vendors/table.py",
        "wheelhous[e]",
    }
    assert "COPY . .\n" in code
    # A stage does not inherit arguments: without these it would ask the public registry, also where there is none.
    assert set(re.findall(r"^ARG (PIP_\w+)$", code, re.MULTILINE)) == set(
        re.findall(r"^ARG (PIP_\w+)$", stage, re.MULTILINE)
    )
    assert re.findall(r"^COPY --from=(\w+)", final, re.MULTILINE) == ["dependencies", "code"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_hadolint_has_nothing_to_say(flavour):
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: make deploy-environment installs it")
    ran = subprocess.run([hadolint, str(ROOT / f"Dockerfile.{flavour}")], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


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
def others(builder: Builder, context: Path) -> Iterator[dict[str, Future[str]]]:
    """Build the other images, two at a time; yield the future name of each."""
    with ThreadPoolExecutor(2) as pool:
        flavours = [flavour for flavour in FLAVOURS if flavour != "cpu"]
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


def wait_for_readiness(running, log):
    line = running.process.stdout.readline()
    assert line.startswith("anychip serves"), f"{line!r} {log.read_text()}"


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
    assert labels["org.opencontainers.image.version"] == version()


@pytest.mark.timeout(1800)
def test_it_answers_as_uid_10001_with_a_read_only_root_and_a_small_shared_memory(builder, image, cache, tmp_path):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    running, url = started(builder, image, cache, tmp_path, "--grpc-port", str(free_port()))
    with running as inside:
        wait_for_readiness(inside, tmp_path / "service.log")  # Every image has gRPC, without which it would not start.
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
@pytest.mark.parametrize("flavour", [flavour for flavour in FLAVOURS if flavour != "cpu"])
def test_the_other_images_are_built_over_the_stand_in(builder, others, flavour):
    """Without the vendor's extras, which its base brings; `anychip doctor` passes while it is built."""
    image = others[flavour].result()
    assert builder.config(image)["User"] == "10001:0"
    builder("rmi", image)
