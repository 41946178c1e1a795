"""Simulated device as a shared library, compiled for the installed torch.

Owns: the compiler's command line and the cache. It is one call without setuptools and ninja, so that g++ suffices.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

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
    own = folder / f"{library.name}.{os.getpid()}"
    options = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    paths = [f"-I{home / 'include'}", str(_SOURCE), f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    with _signals_end_it_first() as running:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            process = subprocess.Popen(
                [*compiler, *options, *paths, "-o", str(own)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # A group of its own, so that its children end with it.
            )
            running.append(process.pid)
            errors = process.communicate()[1]
            if process.returncode:
                log.error("%s", errors.strip())
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


@contextlib.contextmanager
def _signals_end_it_first() -> Iterator[list[int]]:
    """End the process groups in the list on SIGTERM or SIGINT, and this process afterwards."""
    running: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield running
        return
    heard: list[int] = []

    def end(number: int, _: object) -> None:
        heard.append(number)
        for group in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield running
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in heard[:1]:
            signal.raise_signal(each)
