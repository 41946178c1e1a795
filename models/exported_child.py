"""The child process in which a network file is read for the first time and tried: `FILE FORM DECLARED ANSWER`.

Owns: nothing but the way in and out. What a file does to the process that opens it, it does here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import Any

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


def _main(file: str, form: str, declared: str, answer: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux: ends with whoever asked, however that ended.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from models.model import ModelError

    try:
        found = _tried(file, form, json.loads(declared))
    except ModelError as error:
        found = {"error": str(error)}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
