"""What the image needs of a host, found in a folder that looks like one."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

from anychip_tools import container
from anychip_tools.container import PreflightError, compose_env, docker_run, helm_values, look, told
from app.cli import main

ASCEND = (
    "dev/davinci0",
    "dev/davinci1",
    "dev/davinci10",
    "dev/davinci_manager",
    "dev/devmm_svm",
    "dev/hisi_hdc",
    "usr/local/Ascend/driver/version.info",
    "usr/local/dcmi/lib",
    "etc/ascend_install.info",
)
DCU = ("dev/kfd", "dev/dri/renderD128", "opt/hyhal/lib")


def host(folder: Path, *files: str, gid: int | None = None) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        if gid is not None:
            os.chown(folder / name, -1, gid)
    return folder


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"/dev/devmm_svm.*/usr/local/Ascend/driver"):
        look("ascend", host(tmp_path, "dev/davinci0", "dev/davinci_manager"))


@pytest.mark.parametrize("place", ["usr/local/sbin/npu-smi", "usr/local/bin/npu-smi"])
def test_every_card_is_passed_and_npu_smi_is_found_in_both_places(tmp_path: Path, place: str) -> None:
    found = look("ascend", host(tmp_path, *ASCEND, place))
    assert found.devices[:3] == ("/dev/davinci0", "/dev/davinci1", "/dev/davinci10")
    command = docker_run("ascend", found, "1.2")
    assert f"source=/{place},target=/usr/local/sbin/npu-smi,readonly" in command
    assert command.endswith("anychip:1.2-ascend")
    assert f"NPU_SMI=/{place}" in compose_env("ascend", found)


def test_compose_is_told_of_all_cards(tmp_path: Path) -> None:
    one = host(tmp_path / "one", *(name for name in ASCEND if name[-1] not in "1" and name != "dev/davinci10"))
    assert "ascend-cards" not in told("ascend", "compose", one)[0]
    text, _ = told("ascend", "compose", host(tmp_path / "three", *ASCEND))
    assert text.splitlines()[:2] == [
        "# ascend-cards.yaml: keep the lines of /dev/davinci1, /dev/davinci10",
        "COMPOSE_FILE=compose.yaml:compose.ascend.yaml:ascend-cards.yaml",
    ]


@pytest.mark.parametrize("newer", [False, True])
def test_the_device_of_newer_cards_is_passed_only_where_it_is(tmp_path: Path, newer: bool) -> None:
    found = look("dcu", host(tmp_path, *DCU, *(["dev/mkfd"] if newer else [])))
    assert ("--device /dev/mkfd" in docker_run("dcu", found, "1")) == newer
    assert ("MKFD_DEVICE=/dev/mkfd" in compose_env("dcu", found)) == newer


def test_groups_are_those_of_the_files(tmp_path: Path) -> None:
    try:
        root = host(tmp_path, *DCU, gid=992)
    except PermissionError:
        pytest.skip("only root may give a file to another group")
    found = look("dcu", root)
    assert "--group-add 992" in docker_run("dcu", found, "1")
    assert helm_values("dcu", found).endswith("--set 'supplementalGroups={992}'")
    assert "KFD_GID=992\nRENDER_GID=992" in compose_env("dcu", found)


def test_the_doctor_says_the_same_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = host(tmp_path, *ASCEND)
    monkeypatch.setattr(container, "told", lambda flavour, form, **_: told(flavour, form, root))
    for form in container.FORMS:
        assert main(["doctor", "--container", "ascend", "--form", form]) == 0
        said = capsys.readouterr()
        assert said.out.strip() == told("ascend", form, root)[0]
        assert said.err == "anychip: no npu-smi here: no telemetry\n"
    assert main(["doctor", "--container", "dcu"]) == 1
    assert capsys.readouterr().err.startswith("anychip: this host has no /dev/kfd, /dev/dri, /opt/hyhal: install")


def test_without_an_installation_it_needs_the_standard_library_alone() -> None:
    """Read, not run: nothing of what the script imports may lie outside the standard library."""
    root = Path(__file__).resolve().parents[2]
    for name in (
        "deploy/preflight.py",
        "plugins/tools/anychip_tools/container.py",
        "plugins/tools/anychip_tools/facts.py",
        "plugins/tools/anychip_tools/__init__.py",
    ):
        for node in ast.walk(ast.parse((root / name).read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {each.partition(".")[0] for each in names} <= {*sys.stdlib_module_names, "anychip_tools"}, name
            assert all(
                each in ("anychip_tools.container", "anychip_tools.facts")
                for each in names
                if each.startswith("anychip")
            ), name
