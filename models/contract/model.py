"""Contract of a network with the rest of anychip, and the terms of requests and answers.

Must not know HTTP, devices or engines, nor import torch, which the server does not have. A Model of images is a
PixelModel (models.contract.pixel_model), one of tensors a TensorModel (models.contract.tensors).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from models.contract.files import OpenedFiles

Finds = Literal["classes", "objects", "other", "tensors"]
"""Content of an answer's entries: `classes`, `detections` with a box each, or `other`, which only the task knows.

`tensors`: the model takes no images.
"""
MaskForm = Literal["polygon", "rle", "png", "none"]
MASK_FORMS: tuple[MaskForm, ...] = ("polygon", "rle", "png", "none")
Norm = Literal["none", "l2"]
Encoding = Literal["auto", "base64"]
Array = npt.NDArray[Any]


PROGRAMS = (".pt2", ".ts", ".torchscript")
"""Suffixes of files that may run any code of their writer; a .onnx is a description, and weights are weights."""
DESCRIPTIONS = (".onnx", ".xml")
"""Suffixes of files that describe a network, from which others' libraries build the executable."""
LIBRARIES = ("timm", "transformers")
"""Libraries that build networks of their own; the first part of the architecture."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a request for its predictions.

    `normalize`: the norm by which vectors are divided. `encoding`: the form of many numbers: as suits the task (a list,
    a PNG), or base64 of little-endian float32. `masks`: the form of masks and class maps. `tensors`: whether the answer
    is also wanted as tensors, which may need more of the network's outputs than predictions do.
    """

    top_k: int = 5
    score_threshold: float = 0.25
    iou_threshold: float = 0.7
    max_detections: int = 300
    min_area: float = 0
    normalize: Norm = "none"
    encoding: Encoding = "auto"
    masks: MaskForm = "polygon"
    tensors: bool = False


class Placement(NamedTuple):
    """Position of an image in the network's input.

    `width` and `height` are the image's as displayed (EXIF applied), in pixels, before any scaled decode. A point (x,
    y) of the image lies at (x * scale + pad_x, y * scale + pad_y) of the input.
    """

    width: int
    height: int
    scale: float = 1.0
    pad_x: float = 0.0
    pad_y: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A tensor of an answer, in the words of the Open Inference Protocol.

    `datatype`: FP32, INT32, …; `shape`: of a batch, which is in front, with -1 for a dimension that may vary.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Model(ABC):
    """A network with its weights and labels; picklable, so that a worker process can receive it.

    `weights` is the name in answers: `official`, `sample`, `random` or that of a file. `input_shape`: of one item in
    bytes; a batch is uint8 [n, *input_shape]. `may_be_infinite`: whether NaN and infinity among the outputs are an
    answer and not a failure. `weights_sha256`: the digest of all its `files`, "" if there is none.
    """

    may_be_infinite: ClassVar[bool] = False

    name: str
    architecture: str
    labels: tuple[str, ...]
    weights: str
    weights_file: str | None
    input_shape: tuple[int, ...]
    weights_sha256: str = field(default="", kw_only=True)
    files: OpenedFiles | None = field(default=None, kw_only=True, compare=False)

    @property
    def has_reference(self) -> bool:
        """True if `network` computes on the CPU, so that an engine can be compared with it."""
        return True

    @property
    def is_program(self) -> bool:
        """True if its file may run any code of its writer."""
        return self.weights_file is not None and Path(self.weights_file).suffix in PROGRAMS

    @property
    def is_foreign(self) -> bool:
        """True if its file is a program, or others' libraries read the file or build the network."""
        if self.is_program or self.architecture.startswith(tuple(f"{name}/" for name in LIBRARIES)):
            return True
        return self.weights_file is not None and Path(self.weights_file).suffix in DESCRIPTIONS

    @property
    @abstractmethod
    def task(self) -> str:
        """Kind of answers: `infer` for tensors, else the name of the task."""

    @property
    @abstractmethod
    def finds(self) -> Finds:
        """Content of the answers' entries."""

    @property
    @abstractmethod
    def limits(self) -> Mapping[str, Mapping[str, float]]:
        """The largest error of each of `measures`, by precision; a missing precision is not served."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """Names of the network's output tensors, in order."""

    @abstractmethod
    def network(self) -> Any:
        """Build the network for a backend and load its weights: eval mode, float32, on the CPU.

        Raises WeightsError when the file does not fit.
        """

    def network_of_shapes(self) -> Any:
        """Build a network for a device that computes nothing: its outputs have the right shapes and types, their values
        mean nothing. Raises the errors of `network`.
        """
        return self.network()

    @abstractmethod
    def reduce(self, outputs: Sequence[Array], index: int, options: Any) -> tuple[Array, ...]:
        """Select, in the worker, the small arrays of item `index` of a batch that the server needs.

        `options`: of the request. Returned arrays own their memory (no views of `outputs`).
        """

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Any]) -> list[tuple[Array, ...]]:
        """Reduce the first items of a batch, one for each of `options`; all items are finite if the model requires it.

        It may return more of each item than `reduce` does, if that is cheaper here than in the server.
        """
        return [self.reduce(outputs, index, each) for index, each in enumerate(options)]

    def errors(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute errors by name of outputs, each [n, ...], against the reference's for the same items: 0 is perfect.

        They are infinite if shapes differ.
        """
        if [output.shape for output in outputs] != [output.shape for output in expected]:
            return dict.fromkeys(self.limits["fp32"], float("inf"))
        return self.measures(expected, outputs)

    @abstractmethod
    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute the errors of outputs of the same shapes."""

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of a ladder of batch sizes that the network can be prepared for; never none."""
        return tuple(ladder)


def softmax(logits: Array) -> Array:
    """Compute a stable softmax over the last axis, float32."""
    logits = logits.astype(np.float32, copy=False)
    scores: Array = logits - np.maximum.reduce(logits, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    return scores
