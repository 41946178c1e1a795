"""An inference request and its answer as tensors by name, for both transports to read and write.

Owns: these types and the checks of their parts (ids, shapes, counts). Must not know models or services, nor import
anything large: app.protocols.documents runs in a small process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import invalid_request
from app.protocols import wire

IMAGE, PIXELS, INPUT, PREDICTIONS = "image", "pixels", "input", "predictions"
"""Names of the tensors of every model of images."""
MAX_TENSORS = 256
"""Most inputs, outputs and parameters of each that a request may name; models have a handful."""
_MOST_DIMENSIONS = 8
_ID = re.compile(r"[^\x00-\x1f\x7f]{0,256}")


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input as bytes, `content`; one of BYTES may also be given as its `elements`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: wire.Buffer = b""
    elements: Sequence[wire.Buffer] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output as the request names it; `classification`: top-k as labels; 0: the raw tensor."""

    name: str
    classification: int = 0


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """An inference request. No `outputs`: all of them."""

    inputs: Sequence[InputTensor]
    outputs: Sequence[RequestedOutput] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output of the answer; `data` of BYTES are its elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any] | list[bytes]


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """The outputs in the order of the request; `made_by`: the device and weights that computed them."""

    outputs: list[OutputTensor]
    made_by: dict[str, str | bool]

    @property
    def data_bytes(self) -> int:
        """Size of all arrays: the work to write the answer."""
        return sum(output.data.nbytes for output in self.outputs if isinstance(output.data, np.ndarray))


def checked_id(given: Any) -> str:
    """Return the client's name for its request. Raises INVALID_REQUEST."""
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise invalid_request("the id must be a string of at most 256 characters, none of them a control character")
    return given


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Return a shape that a tensor can have. Raises INVALID_REQUEST."""
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes) or len(shape) > _MOST_DIMENSIONS:
        raise invalid_request(f"the shape of {name} must be a list of at most {_MOST_DIMENSIONS} dimensions")
    if any(type(length) is not int or not 0 <= length < 2**63 for length in shape):
        raise invalid_request(f"the shape of {name} must be of whole numbers from 0, not {list(shape)!r}")
    wire.size_of(shape)
    return tuple(shape)


def checked_count(what: str, count: int) -> None:
    """Raise INVALID_REQUEST for more inputs, outputs or parameters than a request may name."""
    if count > MAX_TENSORS:
        raise invalid_request(f"{count} {what} are more than the {MAX_TENSORS} a request may name")
