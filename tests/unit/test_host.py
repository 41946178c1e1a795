"""What the machine gives this process, read from file systems made up by the tests."""

from __future__ import annotations

import os
import platform
from math import isnan
from pathlib import Path

import psutil
import pytest

from backends import host


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)


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
    tmp_path: Path, sixteen_cores: None, files: dict[str, str], cores: int
) -> None:
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


def test_memory_without_a_limit_is_the_machine_s(tmp_path: Path) -> None:
    used, total = host.memory_bytes(
        write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    )
    assert 0 < used < total == psutil.virtual_memory().total


def test_processor_names_itself_and_its_extensions(tmp_path: Path) -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: Quick 9000\nflags\t\t: fpu avx512_bf16 amx_tile\n\nprocessor\t: 1\n"
    root = write(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert host.cpu_name(root) == "Quick 9000"
    assert host.cpu_flags(root) == {"fpu", "avx512_bf16", "amx_tile"}


def test_processor_that_says_nothing_still_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")  # It asks `uname -p`, a process.
    assert host.cpu_name(tmp_path)
    assert host.cpu_flags(tmp_path) == frozenset()


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


def test_energy_that_cannot_be_read_is_not_a_number(tmp_path: Path) -> None:
    assert isnan(host.EnergyCounter(tmp_path).joules())
    root = write(tmp_path, package(0, 1))
    counter = host.EnergyCounter(root)
    (root / "sys/class/powercap/intel-rapl:0/energy_uj").unlink()
    assert isnan(counter.joules())


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        ("AVX2", {"fpu"}),
        ("avx512_core_bf16", {"fpu", "avx512_bf16"}),
        ("AVX512_CORE_AMX", {"fpu", "avx512_bf16", "amx_tile"}),
    ],
)
def test_what_onednn_may_not_use_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, kept: set[str]
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("flags\t: fpu avx512_bf16 amx_tile\n")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert host.cpu_flags(tmp_path) == kept


def test_an_arm_processor_says_its_features_and_has_a_number_for_a_name(tmp_path: Path) -> None:
    cpuinfo = (
        "processor\t: 0\nBogoMIPS\t: 200.00\nFeatures\t: fp asimd i8mm bf16\nCPU implementer\t: 0x48\n"
        "CPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0xd01\nCPU revision\t: 0\n"
    )
    root = write(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert host.cpu_flags(root) == {"fp", "asimd", "i8mm", "bf16"}
    assert host.cpu_name(root) == "HiSilicon TaiShan-v110"
