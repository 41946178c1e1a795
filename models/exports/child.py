"""The child process that reads and tries a network file for the first time: `FILE FORM DECLARED ANSWER`.

DECLARED: a file of JSON, as labels may be longer than an argument may be.

FORM: `onnx`, `program`, `script`, `openvino`, or the architecture of a library that builds it, `timm/resnet50`.

Owns: input and output, and the process's confinement (models.confinement): no other program, no socket, no file but
Python's and the tried one. A file's effects on the process that opens it happen here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.exports.answers import Tried

# Of address space: libraries take more than they use, and each thread reserves as much for its allocations.
_MEMORY_BYTES = 4 << 30
_THREAD_BYTES = 256 << 20
_COPIES = 16  # Copies of a file's weights, including a network's results.
# Of processor time, the sum over threads.
_SECONDS = 300
_BYTES_A_SECOND = 1 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _tried(file: str, form: Any, declared: dict[str, Any]) -> Tried:
    from models.contract.errors import ModelError
    from models.exports import image_trial, trial
    from models.exports.answers import Tried

    images = declared.pop("images")
    if images is not None:
        found = image_trial.tried(Path(file), form, **images)
        if found is not None:
            return Tried(images=found)
    hint = image_trial.example(Path(file)) if images is not None and form == "onnx" else ""
    try:
        return Tried(tensors=trial.tried(file, form, declared), hint=hint)
    except ModelError as error:
        return Tried(error=f"{error} {hint}." if hint else str(error))


def _main(file: str, form: str, declared: str, answer: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux: the child ends with the server in any case.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()  # Imports make little garbage, and looking for it takes a seventh of their time.
    import msgspec

    from models.exports.answers import Tried

    gc.enable()
    from models.confinement import confine_program, python_files
    from models.contract.errors import ModelError
    from models.exports import library_files

    given = json.loads(Path(declared).read_bytes())
    own = [Path(each) for each in given.pop("own")]
    with contextlib.suppress(ModelError):  # Reported below.
        if name := library_files.library_of(form):
            library_files.builder().library(name)
    if form == "openvino":
        with contextlib.suppress(ImportError):  # Reported below.
            importlib.import_module("openvino")
    folder = Path(answer).parent
    size = sum(each.stat().st_size for each in own)
    confine_program(
        python_files(),
        [folder, Path(os.devnull)],
        own=own,
        memory_bytes=_MEMORY_BYTES + (os.cpu_count() or 1) * _THREAD_BYTES + _COPIES * size,
        seconds=_SECONDS + size // _BYTES_A_SECOND,
    )
    try:
        found = _tried(file, form, given)
    except ModelError as error:
        found = Tried(error=str(error))
    Path(answer).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
