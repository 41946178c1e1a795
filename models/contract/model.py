"""What a network is to the rest of anychip, and the words in which requests and answers are said.

Owns: the contract every model fulfils. Must not know HTTP, devices or engines, nor import torch, which what answers
does not have. A Model of images is a PixelModel (models.contract.pixel_model), one of tensors a TensorModel
(models.contract.tensors).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from models.contract.digest import OpenedFiles

Finds = Literal["classes", "objects", "other", "tensors"]
"""What the entries of answers have: `classes`, `detections` with a box each, or what the task alone knows.

`tensors`: the model takes no images.
"""
MaskForm = Literal["polygon", "rle", "png", "none"]
MASK_FORMS: tuple[MaskForm, ...] = ("polygon", "rle", "png", "none")
Norm = Literal["none", "l2"]
Encoding = Literal["auto", "base64"]
Array = npt.NDArray[Any]


PROGRAMS = (".pt2", ".ts", ".torchscript")
"""Files that may run whatever their writer liked; a .onnx is a description, and weights are weights."""
DESCRIPTIONS = (".onnx", ".xml")
"""Files that describe a network, of which libraries of others make what computes."""
LIBRARIES = ("timm", "transformers")
"""Those that build networks of their own: the first part of the architecture."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a request may ask of the predictions.

    `normalize`: the norm by which vectors are divided. `encoding`: how many numbers are written: as suits the task (a
    list, a PNG), or as base64 of little-endian float32. `masks`: how masks and class maps are written. `tensors`:
    whether the answer is asked for as tensors too, which may want more of the network's outputs than predictions do.
    """

    top_k: int = 5
    score_threshold: float = 0.25
    iou_threshold: float = 0.7
    max_detections: int = 300
    normalize: Norm = "none"
    encoding: Encoding = "auto"
    masks: MaskForm = "polygon"
    tensors: bool = False


class Placement(NamedTuple):
    """Where an image lies in the network's input.

    `width` and `height` are the image's as displayed (EXIF applied), in pixels, before any scaled decode.
    A point (x, y) of the image lies at (x * scale + pad_x, y * scale + pad_y) of the input.
    """

    width: int
    height: int
    scale: float = 1.0
    pad_x: float = 0.0
    pad_y: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A tensor of an answer, in the words of the Open Inference Protocol.

    `datatype`: FP32, INT32, …; `shape`: of a batch, which is in front, with -1 where a dimension may vary.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Model(ABC):
    """A network with its weights and labels: picklable, so that a worker process can be handed one.

    `weights` is what answers say: `official`, `sample`, `random` or the name of a file. `input_shape`: what one item of
    a batch is, in bytes: the batch is uint8 [n, *input_shape]. `may_be_infinite`: whether NaN and infinity among the
    outputs are an answer, and not a failure. `weights_sha256`: of all its `files`, "" where there is none.
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
        """Whether `network` computes on the CPU, so that there is something to compare an engine with."""
        return True

    @property
    def is_program(self) -> bool:
        """Whether its file may run what its writer liked."""
        return self.weights_file is not None and Path(self.weights_file).suffix in PROGRAMS

    @property
    def is_foreign(self) -> bool:
        """Whether its file is a program, or what computes it is read or built by libraries of others."""
        if self.is_program or self.architecture.startswith(tuple(f"{name}/" for name in LIBRARIES)):
            return True
        return self.weights_file is not None and Path(self.weights_file).suffix in DESCRIPTIONS

    def check_weights(self) -> None:
        """That its files are still those that were opened. Raises WeightsError."""
        if self.files is not None:
            self.files.check()

    @property
    @abstractmethod
    def task(self) -> str:
        """What the model answers with: `infer` for tensors, else the name of the task."""

    @property
    @abstractmethod
    def finds(self) -> Finds:
        """What the entries of its answers have."""

    @property
    @abstractmethod
    def limits(self) -> Mapping[str, Mapping[str, float]]:
        """The largest error of each of `measures`, by precision; one that is missing is not served."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """Names of the network's output tensors, in order."""

    @abstractmethod
    def network(self) -> Any:
        """Build the network and load its weights: eval mode, float32, on the CPU; what a backend loads.

        Raises WeightsError when the file does not fit.
        """

    def network_of_shapes(self) -> Any:
        """The same for a device that computes nothing: the shapes and types of its outputs are right, the values mean
        nothing. Raises as `network`.
        """
        return self.network()

    @abstractmethod
    def reduce(self, outputs: Sequence[Array], index: int, options: Any) -> tuple[Array, ...]:
        """In the worker: the small arrays of item `index` of a batch that are worth sending to the server.

        `options`: what the request asks for. Returned arrays own their memory (no views of `outputs`).
        """

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Any]) -> list[tuple[Array, ...]]:
        """The same of the first items of a batch, as many as there are `options`, all finite where that is asked for.

        More may be sent of each than `reduce` returns, where that is cheaper here than in the server.
        """
        return [self.reduce(outputs, index, each) for index, each in enumerate(options)]

    def errors(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Errors by name of outputs, each [n, ...], against the reference's outputs for the same items: 0 is perfect.

        Infinite where shapes differ.
        """
        if [output.shape for output in outputs] != [output.shape for output in expected]:
            return dict.fromkeys(self.limits["fp32"], float("inf"))
        return self.measures(expected, outputs)

    @abstractmethod
    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """The errors of outputs of the same shapes."""

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        """Those of a ladder of batch sizes that the network can be made ready for; never none."""
        return tuple(ladder)


def softmax(logits: Array) -> Array:
    """Stable softmax over the last axis, float32."""
    logits = logits.astype(np.float32, copy=False)
    scores: Array = logits - np.maximum.reduce(logits, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    return scores
