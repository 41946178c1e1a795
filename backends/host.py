"""Resources of the machine for this process: cores, memory, load, energy, from /proc, /sys and control groups.

`root` is the root of the file system, so that tests can bring their own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from math import nan
from pathlib import Path

import psutil

_ROOT = Path("/")
# ARM's processors have numbers and no names in /proc/cpuinfo; these are from util-linux (sys-utils/lscpu-arm.c).
_ARM_PARTS = {
    ("0x41", "0xd08"): "ARM Cortex-A72",
    ("0x41", "0xd0c"): "ARM Neoverse-N1",
    ("0x41", "0xd40"): "ARM Neoverse-V1",
    ("0x41", "0xd49"): "ARM Neoverse-N2",
    ("0x41", "0xd4f"): "ARM Neoverse-V2",
    ("0x48", "0xd01"): "HiSilicon TaiShan-v110",  # Kunpeng 920
    ("0x48", "0xd02"): "HiSilicon TaiShan-v120",
    ("0x70", "0x662"): "Phytium FTC662",
    ("0x70", "0x663"): "Phytium FTC663",
    ("0x70", "0x862"): "Phytium FTC862",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}


def core_count(root: Path = _ROOT) -> int:
    """Return the number of cores this process may use: its affinity, within its control groups' quota (whole cores)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups("cpu", root):
        version_2, version_1 = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        for files in (version_2, version_1):
            match [word for file in files for word in _words(group / file)]:
                case [quota, period] if quota.isdigit() and period.isdigit() and int(period):  # else "max" or -1
                    cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def memory_bytes(root: Path = _ROOT) -> tuple[int, int]:
    """Return (used by all, total) of the tightest control group with a limit, else of the machine."""
    memory = psutil.virtual_memory()
    used, total = int(memory.total - memory.available), int(memory.total)
    for group in _control_groups("memory", root):
        for limit_file, usage_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _first(group / limit_file), _first(group / usage_file)
            if limit.isdigit() and usage.isdigit() and int(limit) < total:
                words = _words(group / "memory.stat")
                # File cache is counted as usage, but goes before anything is killed.
                reclaimable = int(words[words.index(cache) + 1]) if cache in words else 0
                used, total = max(0, int(usage) - reclaimable), int(limit)
    return used, total


def release_free_memory() -> None:
    """Let the C library give free pages back to the system, if it can (only glibc can)."""
    _call_glibc("malloc_trim", 0)


def return_large_blocks(least_bytes: int) -> None:
    """Let the C library give this process's blocks of at least so many bytes back as soon as they are freed.

    By itself glibc learns from freed blocks that such blocks are wanted again (mallopt(3), "dynamic mmap threshold"),
    and up to 64 MiB of them stay at the end of the memory of every thread, which even `malloc_trim` leaves alone. Other
    C libraries are left alone.
    """
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, least_bytes)
    _call_glibc("mallopt", _M_TRIM_THRESHOLD, least_bytes)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # In malloc.h.


def _call_glibc(name: str, *arguments: int) -> None:
    """Call a function that only glibc has; do nothing without it."""
    if sys.platform == "linux":
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)


def cpu_name(root: Path = _ROOT) -> str:
    """Return the processor's own name, else its architecture."""
    arm = _ARM_PARTS.get((_cpu_field("CPU implementer", root), _cpu_field("CPU part", root)), "")
    return _cpu_field("model name", root) or arm or platform.processor() or platform.machine()


def cpu_flags(root: Path = _ROOT) -> frozenset[str]:
    """Return instruction set extensions by Linux's names (`avx512_bf16`; on ARM `bf16`, `i8mm`); empty if unknown."""
    return frozenset((_cpu_field("flags", root) or _cpu_field("Features", root)).split())


class EnergyCounter:
    """Counter of the processor packages' joules since it was made; RAPL, which usually only root may read."""

    def __init__(self, root: Path = _ROOT) -> None:
        domains = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))  # AMD's are called so, too
        self._packages = [domain for domain in domains if _first(domain / "name").startswith("package")]
        self._last_uj = [_first(package / "energy_uj") for package in self._packages]
        self._total_uj = 0

    def joules(self) -> float:
        """Return the joules; NaN if there is no counter or it may not be read."""
        if not all(last.isdigit() for last in self._last_uj) or not self._packages:
            return nan
        for index, package in enumerate(self._packages):
            now_uj, range_uj = _first(package / "energy_uj"), _first(package / "max_energy_range_uj")
            if not now_uj.isdigit():
                return nan
            step_uj = int(now_uj) - int(self._last_uj[index])
            self._total_uj += step_uj if step_uj >= 0 else step_uj + int(range_uj or 0)
            self._last_uj[index] = now_uj
        return self._total_uj / 1e6


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the directories of the process's group and all above it, versions 1 and 2.

    A container may see its own group mounted as the root while /proc still names the path outside, so every prefix is
    tried.
    """
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = mount
        elif controller in controllers.split(","):
            base = mount / controller
        else:
            continue
        group = base / path.strip("/")
        yield from (directory for directory in (group, *group.parents) if directory.is_relative_to(base))


def _cpu_field(name: str, root: Path) -> str:
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _first(file: Path) -> str:
    return next(iter(_words(file)), "")
