"""Answers of the process that tries a file: messages to the server, as JSON.

Owns: their fields. Must not know how a file is tried (models.exports.child) or served (models.exports.exported).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from models.contract.resize import ResizeHow
from models.contract.tensors import TensorSpec
from models.exports.entry import USUAL, Entry
from models.exports.layouts import Interpretation


@dataclass(frozen=True)
class Export:
    """Facts on calling a network of images. `batch`: the sizes it takes, (1, 1) one at a time; `freed`: whether an ONNX
    file that states batches of 1 is run with others; `entry`: the form of its input.
    """

    how: Interpretation
    batch: tuple[int, int]
    freed: bool = False
    entry: Entry = USUAL


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
