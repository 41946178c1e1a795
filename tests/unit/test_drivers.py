"""Versions of drivers and toolkits, of trees as the vendors' installations leave them on disk.

CANN's files are as people print them: version.cfg of 8.0.RC3, 8.0.0 and 8.0.T63 on public pages (`# version: 1.0`
first), ascend_toolkit_install.info of 8.2.RC1, 8.5.0 and 9.0.0 as Huawei's quick start says to read it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.vendors import table as vendors
from backends.vendors.drivers import cann_of, driver_version, toolkit_version

VERSION_CFG = """# version: 1.0
runtime_running_version=[7.6.0.1.220:8.0.0]
compiler_running_version=[7.6.0.1.220:8.0.0]
hccl_running_version=[7.6.0.1.220:8.0.0]
toolkit_running_version=[7.6.0.1.220:8.0.0]
"""
INSTALL_INFO = """package_name=Ascend-cann-toolkit
version=9.0.0
innerversion=V100R001C25SPC001B216
compatible_version=[V100R001C15],[V100R001C18]
arch=aarch64
os=linux
path=/usr/local/Ascend/cann-9.0.0/aarch64-linux
"""
CANN, TOOLKIT = "usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "version"),
    [
        (
            {f"{CANN}/version.cfg": VERSION_CFG, f"{CANN}/aarch64-linux/ascend_toolkit_install.info": INSTALL_INFO},
            "9.0.0",
        ),
        ({f"{TOOLKIT}/version.cfg": VERSION_CFG}, "8.0.0"),
        ({f"{TOOLKIT}/version.cfg": VERSION_CFG.replace("8.0.0", "8.0.RC3")}, "8.0.RC3"),
        ({f"{TOOLKIT}/x86_64-linux/ascend_toolkit_install.info": INSTALL_INFO.replace("9.0.0", "8.2.RC1")}, "8.2.RC1"),
        ({f"{CANN}/version.cfg": "# version: 1.0\n"}, ""),
        ({}, ""),
    ],
    ids=["cann 9", "without the toolkit", "a candidate", "cann 8", "nothing said", "nothing there"],
)
def test_cann_is_known_by_the_version_that_huawei_gives_it(files: dict[str, str], version: str, tmp_path: Path) -> None:
    assert toolkit_version("cann", tree(tmp_path, files)) == version


def test_the_cann_whose_environment_was_sourced_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = INSTALL_INFO.replace("9.0.0", "8.5.0")
    tree(
        tmp_path,
        {
            f"{CANN}/x86_64-linux/ascend_toolkit_install.info": INSTALL_INFO,
            "mine/x86_64-linux/ascend_toolkit_install.info": info,
        },
    )
    assert toolkit_version("cann", tmp_path) == "9.0.0"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "mine"))
    assert toolkit_version("cann", tmp_path) == "8.5.0"


def test_a_version_that_is_in_no_table_is_paired_like_the_one_before_it() -> None:
    assert (cann_of("2.10.0.post7"), cann_of("2.10.0.post2"), cann_of("2.10.0")) == ("9.1", "9.0", "9.0")
    assert (cann_of("2.13.0"), cann_of("2.6.0.post1")) == ("", "8.2")


@pytest.mark.parametrize(
    ("row", "file", "text", "version"),
    [
        (
            "cuda",
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun",
            "580.65.06",
        ),
        (
            "cuda",
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08",
            "575.57.08",
        ),
        ("npu", "usr/local/Ascend/driver/version.info", "Version=25.2.0\nascendhal_version=7.35.23\n", "25.2.0"),
        ("dcu", "sys/module/hydcu/version", "6.3.30-V1.4", "6.3.30"),
        ("rocm", "sys/module/amdgpu/version", "6.12.12\n", "6.12.12"),
        ("cpu", "proc/version", "Linux 6.1", ""),
    ],
)
def test_a_driver_is_known_by_the_files_of_its_vendors_row(
    row: str, file: str, text: str, version: str, tmp_path: Path
) -> None:
    facts = {each.name: each for each in (*vendors.ACCELERATORS, vendors.CPU)}[row]
    assert driver_version(facts.machine.driver, tree(tmp_path, {file: text})) == version
