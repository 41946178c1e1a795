"""Which version of a vendor's driver is here, read from files: nothing of the vendor's is imported or asked.

Owns: where drivers write their version. Must not decide what a version means.
"""

from __future__ import annotations

import re
from pathlib import Path

# Vendor -> files, and what is their version. Sources: NVIDIA's and AMD's kernel modules; Hygon's hycu and hydcu and
# Kunlun's /proc/kunlun (gpustack/runtime, detector/*.py); Ascend's version.info as its driver package installs it.
_FILES: dict[str, tuple[tuple[str, str], ...]] = {
    "nvidia": (("/proc/driver/nvidia/version", r"(?:Kernel Module.*?|Module for \S+ +)(\d+\.[\d.]+)"),),
    "amd": (("/sys/module/amdgpu/version", r"([\d.]+)"),),
    "hygon": (("/sys/module/hycu/version", r"([\d.]+)"), ("/sys/module/hydcu/version", r"([\d.]+)")),
    "ascend": (("/usr/local/Ascend/driver/version.info", r"(?im)^version=(\S+)"),),
    "kunlun": (("/proc/kunlun/version", r"([\d.]+)"),),
    "cann": (
        ("/usr/local/Ascend/cann/version.cfg", r"(\d+\.\d+[\w.]*)"),
        ("/usr/local/Ascend/ascend-toolkit/latest/version.cfg", r"(\d+\.\d+[\w.]*)"),
    ),
    "rocm": (("/opt/rocm/.info/version", r"([\d.]+)"),),
    "dtk": (("/opt/dtk/.info/version", r"([\d.]+)"),),
}


def driver_version(vendor: str, root: Path = Path("/")) -> str:
    """The version that a driver (or `cann`, `rocm`, `dtk`) has left in a file; empty where there is none."""
    for name, pattern in _FILES.get(vendor, ()):
        try:
            text = (root / name.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if found := re.search(pattern, text):
            return found[1]
    return ""
