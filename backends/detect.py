"""Which accelerators are here: asks child processes, and tells apart the vendors that all answer to torch.cuda.

Owns: the child processes and their time limit, the answers (kept for the life of this process), and the evidence of a
vendor (PCI numbers, device files). Must not import a vendor's package: a driver that hangs or aborts takes a child.

There is one child for each installed package, not one for all: PyTorch allows one out-of-tree device type a process,
and torch_npu ends the process when torch is a CUDA build (observed with torch_npu 2.14.0).
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends import vendors

TIME_LIMIT_S = 60.0
_CHILD = Path(__file__).with_name("detect_child.py")
_UNCLAIMED = "privateuseone"  # What PyTorch calls the out-of-tree device type that nobody has renamed.
# Hygon's architectures that AMD has not; gfx906 is both AMD's MI50 and Hygon's Z100.
_HYGON_ARCHES = ("gfx926", "gfx928", "gfx92a", "gfx936", "gfx938")


@dataclass(frozen=True)
class Found:
    """What a device type answered: the devices, or the `error` (one line).

    `devices`: name, memory_bytes, arch of each; with `error` of one that does not answer.
    """

    error: str = ""
    torch: str = ""
    cuda: str | None = None
    hip: str | None = None
    private_name: str = _UNCLAIMED
    devices: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class SystemEvidence:
    """What the operating system shows of vendors: PCI vendor numbers, Hygon's software, Kunlun's package."""

    pci: frozenset[str] = frozenset()
    hygon_software: bool = False
    kunlun_software: bool = False


@functools.cache
def found(package: str, device_type: str, time_limit_s: float = TIME_LIMIT_S) -> Found:
    """What `device_type` says in a child that has imported `package`; asked once a process. Does not raise."""
    try:
        return _asked(package, device_type, time_limit_s)
    except (OSError, ValueError, TypeError) as error:
        return Found(error=f"it could not be asked: {error}")


def system_evidence() -> SystemEvidence:
    """Read now from /sys and the search paths."""
    pci = set()
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            pci.add(Path(path).read_text(encoding="ascii").strip())
    hygon = Path("/opt/hyhal").exists() or shutil.which("hy-smi") is not None
    return SystemEvidence(frozenset(pci), hygon, any(map(installed, vendors.KUNLUN.packages)))


def installed(package: str) -> bool:
    """Whether Python would find `package`, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def vendor_of_cuda(answer: Found, here: SystemEvidence) -> str:
    """Who is behind torch.cuda: nvidia, amd, hygon, metax, iluvatar, kunlun, or `shim:NAME` for another's disguise.

    The order of the tests is that of the vendors' own documents: gfx906 and `torch.version.cuda` alone prove nothing.
    Unverified on AMD's, Hygon's and the clones' hardware.
    """
    if answer.private_name != _UNCLAIMED:
        return f"shim:{answer.private_name}"
    _, _, tag = answer.torch.partition("+")
    shims = [row for row in vendors.of_type("cuda") if row.vendor not in ("nvidia", "amd", "hygon")]
    for row in shims:
        if any(part in tag for part in row.build_tags):
            return row.vendor
    arches = {str(device["arch"]).partition(":")[0] for device in answer.devices}
    hygons_build = any(part in tag for part in vendors.HYGON.build_tags)
    if answer.hip or hygons_build:
        hygon = hygons_build or vendors.HYGON.pci_vendor in here.pci or here.hygon_software
        return "hygon" if hygon or arches & set(_HYGON_ARCHES) else "amd"
    if here.kunlun_software:
        return vendors.KUNLUN.vendor
    if vendors.NVIDIA.pci_vendor not in here.pci:
        for row in shims:
            if row.pci_vendor in here.pci:
                return row.vendor
    return "nvidia"


def _order(device_type: str) -> dict[str, str]:
    """The variables by which workers will number the devices, so that a number means the same card here."""
    wanted = {name: text for row in vendors.of_type(device_type) for name, text in row.environment.items()}
    return {name: text for name, text in wanted.items() if name.endswith("_DEVICE_ORDER") and name not in os.environ}


def _asked(package: str, device_type: str, time_limit_s: float) -> Found:
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        **_order(device_type),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    # Files, not pipes: a grandchild that lives on would keep a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, str(_CHILD), package, device_type],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        try:
            code = child.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)  # One that is stuck in the driver cannot be ended: it is left behind.
            return Found(error=f"it did not answer within {time_limit_s:g} s; the driver may hang")
        output.seek(0)
        text = output.read()
        if not text:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            last = said[-1][:200] if said else "it said nothing"
            return Found(error=f"it ended the process that asked (status {code}): {last}")
    answer = json.loads(text)
    if "error" in answer:
        lines = [line.strip() for line in answer["error"].splitlines() if line.strip()]
        return Found(error=lines[0][:300] if lines else "it failed without a word")
    return Found(**{**answer, "devices": tuple(answer["devices"])})
