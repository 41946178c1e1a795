"""The child process in which a network file is read for the first time and tried: `FILE FORM DECLARED ANSWER`.

Owns: the way in and out, and what the process may not do (models.confinement): no other program, no socket, no file
but Python's and the one that is tried. What a file does to the process that opens it, it does here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

_MEMORY_BYTES = 64 << 30
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/proc", "/sys/devices/system", "/dev/urandom")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _tried(file: str, form: str, declared: dict[str, Any]) -> Any:
    images = declared.pop("images")
    if images is not None:
        from models import exported_image_trial

        found = exported_image_trial.tried(Path(file), form, images["sidecar"], images["labels"])
        if found is not None:
            return found
    from models import exported_trial

    return exported_trial.tried(file, form, declared)


def _of_python() -> list[Path]:
    """Where modules and libraries lie that are imported when they are first used."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    places = (*sys.path, sys.prefix, sys.base_prefix, sys.exec_prefix, *libraries, *_SYSTEM)
    return [Path(each) for each in places if each]


def _main(file: str, form: str, declared: str, answer: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux: ends with whoever asked, however that ended.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()  # Imports make little garbage, and looking for it takes a seventh of their time.
    from models import exported_image_trial, exported_trial  # noqa: F401 - before it may read little more

    gc.enable()
    from models.confinement import confine_program
    from models.model import ModelError

    given = json.loads(declared)
    folder = Path(answer).parent
    beside = Path(file).absolute()
    names = (beside.stem, "metadata.yaml")
    of_the_file = [each for each in beside.parent.iterdir() if each.name.startswith(names)]
    confine_program([*_of_python(), *of_the_file], [folder, Path(os.devnull)], memory_bytes=_MEMORY_BYTES)
    try:
        found = _tried(file, form, given)
    except ModelError as error:
        found = {"error": str(error)}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
