"""The simulated device as a shared library, compiled for the torch that is here.

Owns: the compiler's command line and the cache. No setuptools and no ninja: one call, and it works where only g++ is.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import torch

from backends.backend import BackendUnavailableError

_SOURCE = Path(__file__).with_name("csrc") / "device.cpp"

log = logging.getLogger(__name__)


def build(folder: Path) -> Path:
    """The library for this torch, in `folder`, compiled (some 10 s) where it is not there yet.

    It fits exactly one build of torch: another loads it without complaint and then fails. Raises
    BackendUnavailableError: no compiler, or a torch without the headers it needs (they are in 2.13 and 2.14).
    """
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
    own = folder / f"{library.name}.{os.getpid()}"
    options = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    paths = [f"-I{home / 'include'}", str(_SOURCE), f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*compiler, *options, *paths, "-o", str(own)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            log.error("%s", done.stderr.strip())
            raise BackendUnavailableError(
                f"The simulated device cannot be compiled for torch {torch.__version__}: the log says why."
            )
        own.rename(library)  # Whole or not at all: several processes may build at once.
    except OSError as error:
        raise BackendUnavailableError(f"The simulated device cannot be compiled: {error}.") from error
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    return library
