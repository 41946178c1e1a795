"""What the machine gives this process and which software it has, read from file systems made up by the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends import host
from backends.vendors import table as vendors
from backends.vendors.drivers import driver_version, toolkit_version


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),  # Half a core is none.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, 16),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            },
            3,
        ),
        # The group is mounted as the root.
        ({"proc/self/cgroup": "0::/host/pod\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/docker/1\n",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "600000\n",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
    ],
)
def test_core_count_is_the_affinity_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    assert host.core_count(write(tmp_path, files)) == cores


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": "1073741824\n",
            "sys/fs/cgroup/box/memory.current": "700\n",
            "sys/fs/cgroup/box/memory.stat": "anon 400\ninactive_file 300\nslab 1\n",
        },
        {
            "proc/self/cgroup": "4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1073741824\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "700\n",
            "sys/fs/cgroup/memory/box/memory.stat": "inactive_file 100\ntotal_inactive_file 300\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "9000\n",
        },
    ],
    ids=["version-2", "version-1"],
)
def test_memory_is_the_limit_and_use_of_the_control_group_without_file_cache(
    tmp_path: Path, files: dict[str, str]
) -> None:
    assert host.memory_bytes(write(tmp_path, files)) == (400, 2**30)


@pytest.mark.parametrize(
    ("cpuinfo", "name", "flags"),
    [
        (
            "processor\t: 0\nmodel name\t: Quick 9000\nflags\t\t: fpu avx512_bf16 amx_tile\n\nprocessor\t: 1\n",
            "Quick 9000",
            {"fpu", "avx512_bf16", "amx_tile"},
        ),
        (
            "processor\t: 0\nBogoMIPS\t: 200.00\nFeatures\t: fp asimd i8mm bf16\nCPU implementer\t: 0x48\n"
            "CPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0xd01\nCPU revision\t: 0\n",
            "HiSilicon TaiShan-v110",
            {"fp", "asimd", "i8mm", "bf16"},
        ),
    ],
    ids=["x86", "ARM, which has a number for a name"],
)
def test_processor_names_itself_and_its_extensions(tmp_path: Path, cpuinfo: str, name: str, flags: set[str]) -> None:
    root = write(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert host.cpu_name(root) == name
    assert host.cpu_flags(root) == flags


def package(index: int, energy_uj: int) -> dict[str, str]:
    domain = f"sys/class/powercap/intel-rapl:{index}"
    return {
        f"{domain}/name": f"package-{index}\n",
        f"{domain}/energy_uj": f"{energy_uj}\n",
        f"{domain}/max_energy_range_uj": "10000000\n",
    }


def test_energy_adds_packages_and_survives_the_wrap(tmp_path: Path) -> None:
    core = {"sys/class/powercap/intel-rapl:0:0/name": "core\n", "sys/class/powercap/intel-rapl:0:0/energy_uj": "5\n"}
    counter = host.EnergyCounter(write(tmp_path, package(0, 9_000_000) | package(1, 0) | core))
    assert counter.joules() == 0
    write(tmp_path, package(0, 1_000_000) | package(1, 500_000))
    assert counter.joules() == pytest.approx(2.5)
    write(tmp_path, package(0, 1_000_000) | package(1, 1_000_000))
    assert counter.joules() == pytest.approx(3.0)


# --- Versions of drivers and toolkits, of trees as the vendors' installations leave them on disk. CANN's files are as
# people print them: version.cfg of 8.0.RC3, 8.0.0 and 8.0.T63 on public pages (`# version: 1.0` first),
# ascend_toolkit_install.info of 8.2.RC1, 8.5.0 and 9.0.0 as Huawei's quick start says to read it; nnrt's and nnae's lie
# where Huawei's pages on an inference host read them. ROCm 10's is of AMD's image dev-ubuntu-24.04:10.0.0-full, where
# /opt/rocm/core is a link through /etc/alternatives and /opt/rocm/.info is missing.

VERSION_CFG = """# version: 1.0
runtime_running_version=[7.6.0.1.220:8.0.0]
compiler_running_version=[7.6.0.1.220:8.0.0]
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
NNRT, NNAE = "usr/local/Ascend/nnrt/latest", "usr/local/Ascend/nnae/latest"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "ROCM_PATH", "ROCM_HOME"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("files", "version"),
    [
        (
            {f"{CANN}/version.cfg": VERSION_CFG, f"{CANN}/aarch64-linux/ascend_toolkit_install.info": INSTALL_INFO},
            "9.0.0",
        ),
        ({f"{TOOLKIT}/version.cfg": VERSION_CFG}, "8.0.0"),
        ({f"{TOOLKIT}/x86_64-linux/ascend_toolkit_install.info": INSTALL_INFO.replace("9.0.0", "8.2.RC1")}, "8.2.RC1"),
        ({f"{NNRT}/aarch64-linux/ascend_nnrt_install.info": INSTALL_INFO}, "9.0.0"),
        ({f"{NNAE}/ascend_nnae_install.info": INSTALL_INFO}, "9.0.0"),
        ({}, ""),
    ],
    ids=["cann 9", "without the toolkit", "cann 8", "nnrt alone", "nnae alone", "nothing there"],
)
def test_cann_is_known_by_the_version_that_huawei_gives_it(files: dict[str, str], version: str, tmp_path: Path) -> None:
    assert toolkit_version(vendors.ASCEND.machine, write(tmp_path, files)) == version


def test_rocm_is_known_in_its_newer_tree(tmp_path: Path) -> None:
    ten = write(tmp_path / "10", {"opt/rocm/core-10.0/.info/version": "10.0.0\n"})
    (ten / "etc/alternatives").mkdir(parents=True)
    for link in ("opt/rocm/core", "etc/alternatives/core"):
        (ten / link).symlink_to(ten / ("etc/alternatives/core" if link.startswith("opt") else "opt/rocm/core-10.0"))
    assert toolkit_version(vendors.AMD.machine, ten) == "10.0.0"


@pytest.mark.parametrize(
    ("row", "variable", "file", "text", "version"),
    [
        (vendors.AMD, "ROCM_PATH", ".info/version", "7.2.4-91\n", "7.2.4"),
        (vendors.AMD, "ROCM_HOME", "core/.info/version", "10.0.0\n", "10.0.0"),
        (vendors.AMD, "ROCM_PATH", ".info/version", "25.04.4\n", ""),  # Of DTK, whose env.sh sets the same variable.
        (vendors.HYGON, "ROCM_PATH", ".info/rocm_version", "25.04.4\n", "25.04.4"),
        (vendors.ASCEND, "ASCEND_TOOLKIT_HOME", "aarch64-linux/ascend_toolkit_install.info", INSTALL_INFO, "9.0.0"),
        (vendors.CAMBRICON, "NEUWARE_HOME", "version.txt", "Neuware Version 4.6.2\n", "4.6.2"),
        (vendors.BIREN, "SUPA_PATH", "version.txt", "1.11.0.0.rc2\n", "1.11.0.0.rc2"),
        (vendors.MOORE_THREADS, "MUSA_HOME", "version.json", '{"musa_toolkits": {\n  "version": "5.1.0",\n', "5.1.0"),
    ],
)
def test_a_toolkit_elsewhere_is_found_by_its_variable(row, variable, file, text, version, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, str(write(tmp_path, {file: text})))
    assert toolkit_version(row.machine, tmp_path / "usual") == version
    # A folder without a version hides no usual place.
    monkeypatch.setenv(variable, str(tmp_path / "empty"))
    usual = row.machine.toolkit_folders[-1].lstrip("/")
    assert toolkit_version(row.machine, write(tmp_path / "usual", {f"{usual}/{file}": text})) == version


@pytest.mark.parametrize(
    ("row", "file", "text", "version"),
    [
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
    assert driver_version(facts.machine.driver, write(tmp_path, {file: text})) == version
