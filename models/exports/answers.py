"""What the process that tries a file says of it: messages to the server, as JSON.

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
class TriedImages:
    """A network of images. `shapes`: of its outputs, for a batch of one; `batch`, `freed`: as Export has them;
    `entry`: how its input takes images; `notes`: what was found by trying it and nobody has stated; `metadata`: texts
    of the file, where its task takes its outputs as they are; `implied`: what a library that builds the network says of
    it, in the keys of a sidecar; `witness`: with what another runtime's numbers were compared, or why with none.
    """

    task: str
    how: Interpretation
    size: tuple[int, int]
    batch: tuple[int, int]
    freed: bool
    resize: ResizeHow
    mean: tuple[float, ...]
    std: tuple[float, ...]
    keypoints: tuple[int, int] | None
    exporter: str
    licence: str
    labels: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()
    entry: Entry = USUAL
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
    """One of these, or the sentence that says what is wrong with the file. `hint`: what to write for another one."""

    images: TriedImages | None = None
    tensors: TriedTensors | None = None
    error: str = ""
    hint: str = ""


decode_tried = msgspec.json.Decoder(Tried).decode
"""JSON -> Tried. Made once and here: files are read in several threads at once, and msgspec, where two of them first
decode a type, has one read what the other has not filled in yet, and crashes (0.22).
"""
