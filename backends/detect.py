"""Detection of accelerators through child processes; tells apart the vendors that all answer to torch.cuda.

Must not import a vendor's package: a driver that hangs or aborts takes a child. There is one child for each installed
package: PyTorch allows one out-of-tree device type a process, and torch_npu ends the process when torch is a CUDA build
(observed with torch_npu 2.14.0).
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
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from anychip_base.interpreter import python_command
from backends.vendors import table as vendors

TIME_LIMIT_S = 60.0
CARD_LIMIT_S = 15.0  # Limit of a card after the first, with which the driver starts.
_CHILD = Path(__file__).with_name("detect_child.py")
_UNCLAIMED = "privateuseone"  # PyTorch's name of the out-of-tree device type while no package has renamed it.
# Hygon's architectures that AMD has not; gfx906 is both AMD's MI50 and Hygon's Z100.
_HYGON_ARCHES = ("gfx926", "gfx928", "gfx92a", "gfx936", "gfx938")


@dataclass(frozen=True)
class Found:
    """Answer of a device type: its devices, or the `error` (one line).

    `devices`: name, memory_bytes, arch of each; with `error` for one that does not answer.
    """

    error: str = ""
    torch: str = ""
    cuda: str | None = None
    hip: str | None = None
    private_name: str = _UNCLAIMED
    devices: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class SystemEvidence:
    """Evidence of vendors in the operating system: PCI vendor numbers, Hygon's software, Kunlun's package."""

    pci: frozenset[str] = frozenset()
    hygon_software: bool = False
    kunlun_software: bool = False


@functools.cache
def found(package: str, device_type: str, time_limit_s: float = TIME_LIMIT_S) -> Found:
    """Return the answer of `device_type` in a child that imports `package`; asked once a process. Does not raise.

    `package` may be `module:function`: the function makes a stand-in for torch's module of the device, for the same
    questions (detect_child.py: is_available, device_count, get_device_properties).
    """
    try:
        return _asked(package, device_type, time_limit_s)
    except (OSError, ValueError, TypeError) as error:
        return Found(error=f"it could not be asked: {error}")


def system_evidence() -> SystemEvidence:
    """Read the evidence from /sys and the search paths."""
    pci = set()
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            pci.add(Path(path).read_text(encoding="ascii").strip())
    hygon = Path("/opt/hyhal").exists() or shutil.which("hy-smi") is not None
    return SystemEvidence(frozenset(pci), hygon, any(map(installed, vendors.KUNLUN.packages)))


def installed(package: str) -> bool:
    """Return True if Python would find `package`, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def vendor_of_cuda(answer: Found, here: SystemEvidence) -> str:
    """Return the vendor behind torch.cuda: nvidia, amd, hygon, metax, iluvatar, kunlun, or `shim:NAME` for a shim.

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
    """Return the variables that fix the order of devices in workers, so that a number means the same card here."""
    wanted = {name: text for row in vendors.of_type(device_type) for name, text in row.environment.items()}
    return {name: text for name, text in wanted.items() if name.endswith("_DEVICE_ORDER") and name not in os.environ}


def _asked(package: str, device_type: str, time_limit_s: float) -> Found:
    """Ask all devices in one child, then those that failed or were not reached, each by a child of its own."""
    answers = _ChildAnswers(package, device_type, time_limit_s)
    head, devices = answers.head, list(answers.devices)
    if head is None:
        return Found(error=answers.end)
    count = head.pop("count")
    if answers.end:
        devices.append(_silent(answers.end))
    silent = len(devices) - 1 if answers.end else -1  # The device at which a child ended or hung is not asked again.
    devices += [_silent("")] * (count - len(devices))
    missing = [index for index, each in enumerate(devices) if "error" in each and index != silent]
    if missing:
        with ThreadPoolExecutor(len(missing)) as threads:
            alone = threads.map(lambda index: _alone(package, device_type, time_limit_s, index), missing)
            for index, each in zip(missing, alone, strict=True):
                devices[index] = each.devices[0] if each.devices else _silent(each.end)
    return Found(**head, devices=tuple(devices))


def _alone(package: str, device_type: str, time_limit_s: float, index: int) -> _ChildAnswers:
    """Ask a child that sees only this card: a runtime may open card 0 first, even for another one (torch_npu:
    NpuSysCtrl::Initialize). Several vendors share a device type: each reads its own variable. If none is known, the
    child sees all of them.
    """
    rows, only = vendors.of_type(device_type), dict[str, str]()
    for row in [row for row in rows if package in row.packages] or rows:
        if name := row.visibility_variable:
            seen = [each.strip() for each in os.environ.get(name, "").split(",") if each.strip()]
            only[name] = seen[index] if index < len(seen) else str(index)
    return _ChildAnswers(package, device_type, time_limit_s, 0 if only else index, only)


def _silent(end: str) -> Mapping[str, Any]:
    return {"name": "", "memory_bytes": 0, "arch": "", "error": end}


class _ChildAnswers:
    """Answers of a child about all devices, or the `only` one, until its end.

    `head`: common facts, None without an answer; `devices`: each one's answer; `end`: the reason for missing answers,
    empty if all have answered.
    """

    def __init__(
        self,
        package: str,
        device_type: str,
        time_limit_s: float,
        only: int | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Run a child until it has ended, or was ended. `variables`: of its own. Raises OSError, ValueError."""
        self.head: dict[str, Any] | None = None
        self.devices: list[Mapping[str, Any]] = []
        self.end = ""
        command = python_command(str(_CHILD), package, device_type, *([] if only is None else [str(only)]))
        environment = {
            **os.environ,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            **_order(device_type),
            **variables,
        }
        # Files, not pipes: a grandchild that lives on would keep a pipe open.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
            silent_s = self._wait(child, output, time_limit_s)
            self._read(output)
            if self.end or (self.head is not None and len(self.devices) == (self.head["count"] if only is None else 1)):
                return
            if silent_s:
                self.end = f"it did not answer within {silent_s:g} s; the driver may hang"
                return
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            last = lines[-1][:200] if lines else "it said nothing"
            self.end = f"it ended the process that asked (status {child.returncode}): {last}"

    @staticmethod
    def _wait(child: subprocess.Popen[bytes], output: IO[bytes], time_limit_s: float) -> float:
        received_bytes, received_s = 0, time.monotonic()
        while True:
            # The first two are what all devices share, and the first one, with which the driver starts.
            started = os.pread(output.fileno(), received_bytes, 0).count(b"\n") > 1
            limit_s = min(CARD_LIMIT_S, time_limit_s) if started else time_limit_s
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.1)
                return 0.0
            now_bytes, now_s = os.fstat(output.fileno()).st_size, time.monotonic()
            if now_bytes > received_bytes:
                received_bytes, received_s = now_bytes, now_s
            elif now_s - received_s > limit_s:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1.0)  # One that is stuck in the driver cannot be ended: it is left behind.
                return limit_s

    def _read(self, output: IO[bytes]) -> None:
        output.seek(0)
        for line in output.read().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            answer = json.loads(line)
            if self.head is not None:
                self.devices.append(answer)
            elif "error" in answer:
                lines = [part.strip() for part in answer["error"].splitlines() if part.strip()]
                self.end = lines[0][:300] if lines else "it failed without a word"
                return
            else:
                self.head = answer
