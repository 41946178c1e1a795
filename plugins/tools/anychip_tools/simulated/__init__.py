"""Simulated accelerators: torch devices such as `npu` or `mlu`, in host memory and on the CPU.

Owns: when they exist (`ANYCHIP_SIMULATE`, docs/simulation.md), and the stand-ins for the vendors' packages, which a
process finds only then. They prove what the host does (placement, copies, order, memory, faults), never speed or
numerics of a chip. Must not be taken for hardware: doctor, answers and reports name them as simulated.

    configure ─► compiles csrc/ once per torch ─► a stand-in on sys.path ─► import torch_npu ─► device.install
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from anychip_tools.simulated.behaviour import Simulation, parse, row_of
from anychip_tools.simulated.library import build
from backends.contract.errors import BackendUnavailableError
from backends.simulated import VARIABLE
from backends.vendors.table import Facts

_LIBRARY = "ANYCHIP_SIMULATE_LIBRARY"  # Processes started from here inherit it, as they do VARIABLE.
_STAND_IN = '''"""Stands in for {package}: a simulated device, where ANYCHIP_SIMULATE asks for it."""

import sys

from anychip_tools.simulated.device import install

{device_type} = install("{device_type}")
sys.modules["{package}.{device_type}"] = {device_type}
'''


def configure(text: str, cache_dir: Path) -> None:
    """Simulate devices here and in child processes; empty text simulates none.

    The first time for a version of torch it compiles for some seconds, into `cache_dir`/simulated. Raises
    BackendUnavailableError (`text`, no compiler, a torch it cannot be compiled for), and then changes nothing.
    """
    packages = cache_dir / "simulated" / "stand-ins"
    others = [path for path in sys.path if Path(path).parent.name != packages.name or "simulated" not in path]
    if not text.strip():
        os.environ.pop(VARIABLE, None)
        sys.path[:] = others
        return
    simulation = parse(text)
    os.environ[_LIBRARY] = str(build(cache_dir / "simulated"))
    os.environ[VARIABLE] = text
    # Before the vendor's own package, which may be installed.
    sys.path[:] = [str(_stand_ins(packages, row_of(simulation.device_type))), *others]


def _stand_ins(packages: Path, row: Facts) -> Path:
    """Write stand-ins for the packages of the device type, each whole or not at all; return their folder.

    Raises BackendUnavailableError.
    """
    folder = packages / row.device_type
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for package in row.packages:
            own = folder / f"{package}.{os.getpid()}"
            own.write_text(_STAND_IN.format(package=package, device_type=row.device_type), encoding="utf-8")
            own.replace(folder / f"{package}.py")
    except OSError as error:
        raise BackendUnavailableError(f"The simulated device cannot be set up in {folder}: {error}.") from error
    return folder


def configured() -> tuple[Simulation, Path]:
    """Return the simulation and the compiled device. Raises BackendUnavailableError if there is none."""
    text, library = os.environ.get(VARIABLE, ""), os.environ.get(_LIBRARY, "")
    if not text.strip() or not library:
        raise BackendUnavailableError(
            "This is a stand-in for a vendor's package: it does nothing unless ANYCHIP_SIMULATE asks anychip for a "
            "simulated device, as in ANYCHIP_SIMULATE=npu:2."
        )
    return parse(text), Path(library)
