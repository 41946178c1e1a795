"""Row of the zoo. Owns: its terms. Must not import a library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

Kind = Literal["scores", "boxes", "vector", "class_map", "depth", "values"]

Floats = npt.NDArray[np.float32]

LABELS = [f"thing {number}" for number in range(5)]


@dataclass
class Made:
    """A file that was written, and what its library answers to each picture."""

    model: str
    """Text behind `NAME=`; `{}` is the row's folder."""
    kind: Kind
    answers: Sequence[Floats]
    """`scores`: [classes]; `boxes`: [k, 6], corners, score, class; `vector`, `values`: [d]; others: [h, w]."""
    sides: tuple[int, int] | None = None
    """Width and height of the pictures, where they are brought to those of the network."""
    refused: str = ""
    """Text behind `NAME=` for the refused file; `model` is then the file that the refusal's line writes."""
    line: str = ""
    """Text that the refusal must contain."""


@dataclass
class Network:
    """A row: what is written, and how."""

    name: str
    library: str
    file: str
    """Form of the file, in a few words."""
    build: Callable[[Path, Sequence[Image.Image]], Made]
    package: str
    """Its module, without which the row cannot be built."""
    reference: str
    """Part of the library that answers, in a few words."""


def pictures() -> list[Image.Image]:
    """Three pictures: blocks in colour, grey ones upright, and oblong ones with transparency."""
    made = []
    for seed, (size, mode) in enumerate((((500, 333), "RGB"), ((240, 320), "L"), ((421, 333), "RGBA"))):
        channels = {"RGB": 3, "L": 1, "RGBA": 4}[mode]
        blocks = np.random.default_rng(seed).integers(0, 256, (9, 12, channels)).astype(np.uint8)
        if mode == "RGBA":
            blocks[..., 3] = 255
            blocks[2:4, 3:5, 3] = 90
        picture = Image.fromarray(blocks.squeeze(), mode).resize(size, Image.Resampling.BICUBIC)
        made.append(picture)
    return made


def as_arrays(answers: Sequence[Any]) -> list[Floats]:
    """Return tensors as arrays of float32."""
    return [np.asarray(each.detach() if hasattr(each, "detach") else each, np.float32) for each in answers]
