"""What the image needs of a host, found in a folder that looks like one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.preflight import NEEDS, PreflightError, compose_env, docker_run, helm_values, look

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


def test_a_tool_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    found = look("ascend", host(tmp_path, *ASCEND))
    assert "npu-smi" not in docker_run("ascend", found, "1")
    assert "NPU_SMI=/dev/null" in compose_env("ascend", found)


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


def test_there_is_one_for_every_image() -> None:
    root = Path(__file__).resolve().parents[2]
    assert {path.suffix[1:] for path in root.glob("Dockerfile.*") if "-" not in path.suffix} == set(NEEDS)
