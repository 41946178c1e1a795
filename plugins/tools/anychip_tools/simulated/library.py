"""Simulated device as a shared library, compiled for the installed torch.

Owns: the compiler's command line and the cache. It is one call without setuptools and ninja, so that g++ suffices.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from anychip_tools.child_service import ended_in_order, run_group
from backends.contract.errors import BackendUnavailableError

_SOURCE = Path(__file__).with_name("csrc") / "device.cpp"

log = logging.getLogger(__name__)


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
