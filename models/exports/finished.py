"""Finished files: what a vendor's compiler has made, such as `.om`, which only that vendor's runtime reads.

Owns: what has to be known of one, and who says it. Must not know any vendor: a reader is put into READERS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.contract.errors import WeightsError


@dataclass(frozen=True)
class Finished:
    """What a runtime says of a file. `inputs`, `outputs`: shapes, the batch in front; `batch_sizes`: those it takes."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    batch_sizes: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images. Raises WeightsError for a network that takes something else."""
        for shape in self.inputs[:1] if len(self.inputs) == 1 else ():
            if len(shape) == 4 and 3 in (shape[1], shape[3]):
                return (shape[2], shape[3]) if shape[1] == 3 else (shape[1], shape[2])
        raise WeightsError(f"a finished network takes one input [n, 3, height, width], not {list(self.inputs)}")


READERS: dict[str, Callable[[Path], Finished]] = {}
"""By suffix: asks the runtime. Raises WeightsError."""


def read_finished(file: Path) -> Finished:
    """What the runtime says of a file. Raises WeightsError."""
    if file.suffix not in READERS:
        raise WeightsError(f"nothing here reads {file.name}: it was compiled for a device of its own.")
    return READERS[file.suffix](file)
