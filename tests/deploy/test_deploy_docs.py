"""The pages about deployment: commands that name what there is."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

yaml = pytest.importorskip("yaml")
from tests.support.manifests import CHART, FLAVOURS, ROOT, VERSION  # noqa: E402

PAGES = {flavour: (ROOT / "docs" / "install" / f"{flavour}.md").read_text() for flavour in FLAVOURS}
DEPLOY = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("deploy", "kubernetes"))


def compose_of(flavour):
    return yaml.safe_load((ROOT / "deploy" / "compose" / f"compose.{flavour}.yaml").read_text())["services"]["anychip"]


def by_default(name):
    """Return what Compose puts in the place of a variable that nobody sets."""
    return re.sub(r"\$\{\w+:-(.+)\}", r"\1", name)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_devices_and_mounts_are_the_same_in_page_table_compose_and_chart(flavour):
    service = compose_of(flavour)
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "anychip" / f"values-{flavour}.yaml").read_text())
    devices = {by_default(device) for device in service.get("devices", ())} - {"/dev/null"}
    # A file that is missing must be an error: Docker's short form would make a folder of root's of it.
    assert all(mount["bind"] == {"create_host_path": False} for mount in service.get("volumes", ()))
    mounts = {(by_default(mount["source"]), mount["target"]) for mount in service.get("volumes", ())}
    image = f"anychip:{VERSION}-{flavour}"
    [row] = [line for line in DEPLOY.splitlines() if "docker run $COMMON" in line and f"{image}`" in line]
    [command] = [
        line for line in PAGES[flavour].splitlines() if line.startswith("docker run --rm --init") and "/cache" in line
    ]
    for text in (row, command):
        assert set(re.findall(r"--device (\S+)", text)) == devices
        assert set(re.findall(r"--mount type=bind,source=(\S+),target=(\S+),readonly", text)) == mounts
        assert set(re.findall(r"--volume (\S+)", text)) <= {"anychip:/cache"}
        assert ("--gpus all" in text) == (flavour == "cuda")
        assert ("--group-add" in text) == ("group_add" in service) == bool(values.get("deviceFiles"))
    # Of the vendor's tool the chart mounts folders: a file that a node lacks would keep the pod from starting.
    tools = {source for source, _ in mounts if source.endswith(("npu-smi", "cnmon"))}
    chart = {entry["path"] for entry in values.get("hostPaths", ())}
    assert chart - {"/usr/local/sbin", "/usr/local/bin"} == {source for source, _ in mounts} - tools


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_what_an_install_page_builds_is_what_it_pushes_and_what_the_deployments_pull(flavour):
    page, image = PAGES[flavour], f"anychip:{VERSION}-{flavour}"
    [built] = re.findall(r"^docker build -f (\S+) -t (\S+)", page, re.MULTILINE)
    assert built == (f"Dockerfile.{flavour}", image)
    [(source, pushed)] = re.findall(r"^docker tag (\S+) (\S+)$", page, re.MULTILINE)
    assert (source, pushed) == (image, f"registry.example.com/{image}")
    assert f"docker push {pushed}\n" in page
    assert compose_of(flavour)["image"] == f"${{ANYCHIP_IMAGE:-{image}}}"
    overlay = yaml.safe_load((ROOT / "deploy" / "kserve" / flavour / "kustomization.yaml").read_text())
    [pulled] = overlay["images"]
    assert f"{pulled['newName']}:{pulled['newTag']}" == image
    makefile = (ROOT / "Makefile").read_text()
    assert "--tag $(IMAGE):$(VERSION)-$*" in makefile
    bake = (ROOT / "docker-bake.hcl").read_text()
    assert f'tags = ["${{IMAGE}}:${{VERSION}}-{flavour}"]' in bake
    assert f'variable "VERSION" {{ default = "{VERSION}" }}' in bake
    gpustack = (ROOT / "deploy" / "upstream" / "gpustack" / "anychip" / "spec.yaml").read_text()
    assert f"image_name: {image}\n" in gpustack


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_chart_installed_as_the_page_says_pulls_the_image_that_was_pushed(chart, flavour):
    page = PAGES[flavour]
    [command] = re.findall(r"^helm install anychip (.+)$", page, re.MULTILINE)
    folder, *words = shlex.split(command)
    assert (ROOT / folder).samefile(CHART)
    values = {}
    while words:
        word = words.pop(0)
        if word == "-f":
            values.update(yaml.safe_load((ROOT / words.pop(0)).read_text()))
        elif word == "--set":
            name, _, value = words.pop(0).partition("=")
            parsed = [int(each) for each in value[1:-1].split(",")] if value.startswith("{") else value
            outer, _, inner = name.partition(".")
            values[outer] = {**values.get(outer, {}), inner: parsed} if inner else parsed
        else:
            assert word == "--wait"
    rendered = chart.render(values, name="anychip", namespace="default")
    [text] = [text for path, text in rendered.items() if path.endswith("/deployment.yaml")]
    [container] = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    [pushed] = re.findall(r"^docker push (\S+)$", page, re.MULTILINE)
    assert container["image"] == pushed


def test_the_systemd_unit_lets_no_process_reach_into_another(tmp_path):
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")

    def members(name):
        """System calls of a group of systemd's, or the one that is named."""
        if not name.startswith("@"):
            return {name}
        said = subprocess.run([tool, "syscall-filter", name], capture_output=True, text=True, check=True).stdout
        lines = [line.strip() for line in said.splitlines()[1:]]
        return set().union(*(members(line) for line in lines if line and not line.startswith("#")))

    allowed = set()
    unit = (ROOT / "deploy" / "systemd" / "anychip@.service").read_text()
    for line in re.findall(r"^SystemCallFilter=(.+)$", unit, re.MULTILINE):
        calls = set().union(*map(members, line.removeprefix("~").split()))
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    into_others = {"ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "process_madvise"}
    assert allowed & into_others == set()
    assert allowed >= {"seccomp", "landlock_restrict_self", "clone", "pidfd_open", "memfd_create", "execve", "accept4"}


def test_a_service_is_given_longer_to_stop_than_it_takes():
    from app.config import Settings

    unit = (ROOT / "deploy" / "systemd" / "anychip@.service").read_text()
    stop_s = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
    defaults = {name: Settings.model_fields[name].default for name in ("grace_s", "drain_s")}
    assert stop_s >= sum(defaults.values()) + 10
    example = (ROOT / "deploy" / "systemd" / "example.env").read_text()
    names = {name.lower() for name in re.findall(r"^ANYCHIP_(\w+)=", example, re.MULTILINE)}
    assert names <= set(Settings.model_fields)
