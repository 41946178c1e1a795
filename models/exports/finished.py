"""Finished files: results of a vendor's compiler, such as `.om`, which only that vendor's runtime reads.

Owns: the facts on one, the module that tells them (a package's entry point of the group `anychip.finished` named by the
suffix), and the process in which it runs. Must not import a vendor's package, or the module.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from anychip_base.extras import entry_points, how_to_install
from anychip_base.interpreter import python_command
from models.contract.errors import WeightsError

_CHILDREN = {f".{entry.name}": entry.value for entry in entry_points("anychip.finished")}
_EXTRAS = {".om": "ascend"}
FINISHED = tuple(dict.fromkeys((*_EXTRAS, *_CHILDREN)))
_TIME_LIMIT_S = 120.0


@dataclass(frozen=True)
class Finished:
    """A runtime's facts on a file. `inputs`, `outputs`: shapes, the batch in front; `batch_sizes`: that it takes."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    batch_sizes: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images. Raises WeightsError for a network with another input."""
        for shape in self.inputs[:1] if len(self.inputs) == 1 else ():
            if len(shape) == 4 and 3 in (shape[1], shape[3]):
                return (shape[2], shape[3]) if shape[1] == 3 else (shape[1], shape[2])
        raise WeightsError(f"a finished network takes one input [n, 3, height, width], not {list(self.inputs)}")


def read_finished(file: Path) -> Finished:
    """Ask the runtime about a file. Raises WeightsError."""
    if file.suffix not in _CHILDREN:
        raise WeightsError(f"What reads {file.name} is not installed: {how_to_install(_EXTRAS[file.suffix])}.")
    try:
        done = subprocess.run(
            python_command("-m", _CHILDREN[file.suffix], str(file)),
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
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
