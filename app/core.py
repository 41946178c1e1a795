"""Records that pass through several rooms, each in one shape from the process that makes it to the client.

Owns: these shapes. Must not know who makes or reads them. The messages of processes bound their sizes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=200)]
"""Name that a worker gives something and that the server then counts under."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""Number and time that another process measured: no NaN and nothing below 0, else sums would be spoilt for good."""


@dataclass(slots=True)
class DecodedBy:
    """Decoder of JPEG files: the `host` or the `device`. `refusal`: why the device does not decode, if it was asked to;
    `errors`: of answers to its pixels against those to the host's.
    """

    by: Literal["host", "device"]
    refusal: str
    errors: dict[str, float]


@dataclass(slots=True)
class ServedOn:
    """A model on a device. `staged`: another engine or precision is made ready meanwhile, and takes over.
    `memory_bytes`: its share of the device's memory, its largest batch included, as measured when it was loaded;
    `load_s`: the time of that load, compiling and the gate included.
    """

    device: str
    engine: Name
    precision: Name
    staged: bool
    batch_sizes: list[int]
    refusals: dict[str, str]
    errors: Annotated[dict[Name, float], msgspec.Meta(max_length=64)]
    operators: dict[str, str]
    decoding: DecodedBy
    memory_bytes: int
    load_s: Seconds


@dataclass(slots=True)
class Loaded(ServedOn):
    """Message of a worker: the model of this number serves. `latency_s`: seconds a batch of each size took after
    warm-up; `depth`: how many batches may have begun at once; `rejected`: engines, each with its precision, whose
    answers the gate found wrong; `grows`: a worker with more time tries larger batches.
    """

    model: int
    latency_s: dict[int, Seconds]
    depth: Count = 1
    rejected: Annotated[tuple[tuple[Name, Name], ...], msgspec.Meta(max_length=64)] = ()
    grows: bool = False
