"""Objects as data: every model, device and plan comes back as it was, and nothing else is called."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.processes.packing import read_packed, unpacked, write_packed
from models import NormalisedModel, PixelModel, open_model, parse_spec


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True, slots=True)
class Inner:
    value: float


@dataclass(frozen=True)
class Outer:
    inner: Inner
    colour: Colour
    path: Path
    names: dict[tuple[str, int], list[int]]
    array: np.ndarray = field(compare=False)

    def __post_init__(self) -> None:
        assert self.names, "called while it is read: its fields are not there"


def again(value: object) -> object:
    return read_packed(write_packed(value, "value"))


def test_what_an_object_consists_of_comes_back() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2]
    made = Outer(Inner(1.5), Colour.RED, Path("/x"), {("a", 1): [1, 2]}, array)
    back = again(made)
    assert back == made
    assert np.array_equal(back.array, array)
    assert again(MappingProxyType({"a": (1,)})) == {"a": (1,)}


@pytest.mark.parametrize("spec", ["resnet18:random", "yolov8n:random", "resnet50:sample"])
def test_models_come_back(spec: str, tmp_path: Path) -> None:
    model = open_model(parse_spec(spec), tmp_path)
    assert again(model) == model
    assert isinstance(model, PixelModel)
    assert again(NormalisedModel.of(model)) == NormalisedModel.of(model)


@pytest.mark.parametrize("value", [open, int, Path.exists, lambda: 0, iter(()), {1, 2}, 1j])
def test_what_is_more_than_data_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        write_packed(value, "value")


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        unpacked(data, memoryview(b""))
    except (ValueError, TypeError, ImportError, IndexError, AttributeError, KeyError, RecursionError):
        return
