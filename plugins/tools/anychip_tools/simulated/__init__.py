"""Simulated accelerators: torch devices such as `npu` or `mlu`, in host memory and on the CPU (docs/simulation.md).

They prove what the host does, never speed or numerics of a chip. Must not be taken for hardware.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from anychip_tools.behaviour import Simulation, parse_simulation, row_of
from anychip_tools.child_service import ended_in_order, run_group
from backends.contract.errors import BackendUnavailableError
from backends.simulated import VARIABLE
from backends.vendors.table import Facts

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("csrc") / "device.cpp"
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
    simulation = parse_simulation(text)
    os.environ[_LIBRARY] = str(build(cache_dir / "simulated"))
    os.environ[VARIABLE] = text
    # Before the vendor's own package, which may be installed.
    sys.path[:] = [str(_stand_ins(packages, row_of(simulation.device_type))), *others]


def _stand_ins(packages: Path, row: Facts) -> Path:
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
    return parse_simulation(text), Path(library)


def build(folder: Path) -> Path:
    """Return the library for this torch in `folder`; compile it (some 10 s) if it is not there yet.

    It fits exactly one build of torch: another loads it without complaint and then fails. Raises
    BackendUnavailableError: no compiler, or a torch without the headers it needs (they are in 2.13 and 2.14).
    """
    import torch

    abi = int(torch.compiled_with_cxx11_abi())
    key = hashlib.sha256(_SOURCE.read_bytes() + f"{torch.__version__} {torch.version.git_version} {abi}".encode())
    library = folder / f"device-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        raise BackendUnavailableError(
            f"Simulated devices are compiled once per version of torch, and there is no C++ compiler {compiler[0]!r}: "
            "install g++, or name another in CXX."
        )
    log.warning("compiling the simulated device for torch %s", torch.__version__)
    home = Path(torch.__file__).parent
    options = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    paths = [f"-I{home / 'include'}", str(_SOURCE), f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ended_in_order(), tempfile.TemporaryDirectory(dir=folder) as own:
            code, _, errors = run_group([*compiler, *options, *paths, "-o", f"{own}/{library.name}"])
            if code:
                log.error("%s", errors.strip())
                raise BackendUnavailableError(
                    f"The simulated device cannot be compiled for torch {torch.__version__}: the log says why."
                )
            Path(own, library.name).rename(library)  # Whole or not at all: several processes may build at once.
    except OSError as error:
        raise BackendUnavailableError(f"The simulated device cannot be compiled: {error}.") from error
    return library
