"""Answers of the process that tries a file, as JSON, and the form of a network's input in them.

Must not know how a file is tried (models.exports.child) or served (models.exports.exported).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from models.contract.resize import ResizeHow
from models.contract.tensors import TensorSpec
from models.exports.layouts import Interpretation

_CHANNELS = (3, 1)


@dataclass(frozen=True)
class Entry:
    """Form of an input. `channels`: 3, or 1 for grey images; `last`: [n, height, width, channels], as in TensorFlow;
    `levels`: numbers of 0 to 255 that the network itself normalises; `of_bytes`: as uint8, and not as floats; `bgr`:
    blue before green and red.
    """

    channels: int = 3
    last: bool = False
    levels: bool = False
    of_bytes: bool = False
    bgr: bool = False


USUAL = Entry()


def entry_of(shape: Sequence[int | str | None], is_bytes: bool) -> tuple[Entry, int | None, int | None] | None:
    """Return the form of an input of four axes, and its height and width, None if open; None if not of images.

    `is_bytes`: whether its type is uint8.
    """
    _, first, second, third = (each if isinstance(each, int) else None for each in shape)
    if first in _CHANNELS or (first is None and third not in _CHANNELS):
        return Entry(first or 3, levels=is_bytes), second, third
    return (Entry(third, last=True, levels=is_bytes), first, second) if third in _CHANNELS else None


def entered(entry: Entry, normalised: Tensor) -> Tensor:
    """Convert normalised pixels [n, 3, height, width], whose channels are equal in grey images, to the network's input.

    One image alone is [3, height, width], as for torchvision's detectors.
    """
    found = normalised[..., : entry.channels, :, :] if entry.channels < normalised.shape[-3] else normalised
    if entry.bgr:
        found = found.flip(-3)
    if entry.levels:
        found = found.round()
    if entry.last:
        found = found.permute(0, 2, 3, 1).contiguous()
    return found.clamp(0, 255).to(torch.uint8) if entry.of_bytes else found


@dataclass(frozen=True)
class Export:
    """Facts on calling a network of images. `batch`: the sizes it takes, (1, 1) one at a time; `freed`: whether an ONNX
    file that states batches of 1 is run with others; `entry`: the form of its input; `in_float32`: whether its code
    wants float32 for a part, so that no shorter precision is tried.
    """

    how: Interpretation
    batch: tuple[int, int]
    freed: bool = False
    entry: Entry = USUAL
    in_float32: bool = False


@dataclass(frozen=True)
class TriedImages:
    """A network of images. `shapes`: of its outputs, for a batch of one; `notes`: findings of the trial that nobody has
    stated; `metadata`: texts of the file, if its task takes its outputs unchanged; `implied`: statements of the library
    that builds the network, in the keys of a sidecar; `witness`: the runtime whose numbers were compared, or why there
    is none.
    """

    task: str
    export: Export
    size: tuple[int, int]
    resize: ResizeHow
    mean: tuple[float, ...]
    std: tuple[float, ...]
    keypoints: tuple[int, int] | None
    exporter: str
    labels: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    witness: str = ""


@dataclass(frozen=True)
class TriedTensors:
    """A network of tensors. `batch_range`: the sizes of batches that it takes."""

    inputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    batched: bool
    batch_range: tuple[int, int]


@dataclass(frozen=True)
class Tried:
    """Result of a trial: a network, or the sentence on the file's fault. `hint`: what to write to have it as images."""

    images: TriedImages | None = None
    tensors: TriedTensors | None = None
    error: str = ""
    hint: str = ""


decode_tried = msgspec.json.Decoder(Tried).decode
"""Decoder of Tried from JSON. It is made once, here: several threads read files, and msgspec crashes (0.22) if two of
them decode a type for the first time, as one reads what the other has not filled in yet.
"""
