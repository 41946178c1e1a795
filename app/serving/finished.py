"""Who reads finished files (models.exports.finished): the runtimes that engines know, each in a process of its own.

Owns: that process and its time limit, and the words between the two. Must not import a vendor's package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from models.contract.errors import WeightsError
from models.exports.finished import READERS, Finished

_TIME_LIMIT_S = 120.0
_CHILDREN = {".om": "backends.engines.om_child"}


def learn_finished_files() -> None:
    """Let models be opened out of the files that an engine of ours runs."""
    READERS.update({suffix: partial(_asked, child) for suffix, child in _CHILDREN.items()})


def _asked(child: str, file: Path) -> Finished:
    """Raises WeightsError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", child, str(file)],
            env={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
        said = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise WeightsError(f"{file.name} was not loaded within {_TIME_LIMIT_S:g} s.") from None
    except (ValueError, LookupError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:200]
        raise WeightsError(f"{file.name} ended the process that loaded it ({done.returncode}): {last}.") from None
    if "error" in said:
        raise WeightsError(f"{file.name} cannot be loaded: {said['error'].rstrip('.')}.")
    inputs, outputs = (tuple(map(tuple, said[name])) for name in ("inputs", "outputs"))
    return Finished(inputs, outputs, tuple(said["batch_sizes"]))
