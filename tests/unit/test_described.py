"""Models as data: what is asked of them is the same, and the model itself comes out where it is wanted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.precision.described import Described, described, weights_key
from app.processes.packing import read_packed, write_packed
from models import Model, NormalisedModel, Options, PixelModel, Placement, TensorModel, open_model, parse_spec
from models.contract.tensors import TensorSpec
from models.exports.exported import ExportedModel

INPUT = TensorSpec("x", "FP32", (4,))


def sample(name: str) -> Model:
    return open_model(parse_spec(name, "sample"), Path(), allow_download=False)


def sent(model: Model) -> Described:
    found: Described = read_packed(write_packed(described(model), "test"))
    return found


@pytest.mark.parametrize("name", ["resnet50", "yolov8n"])
def test_an_image_model_that_was_sent_answers_as_the_model_does(name: str) -> None:
    model = sample(name)
    found = sent(model)
    assert isinstance(model, PixelModel)
    assert isinstance(found, PixelModel)
    assert found == described(model)
    assert found.original == model
    assert weights_key(found) == weights_key(model) != ""
    assert (found.finds, found.limits, found.outputs) == (model.finds, model.limits, model.outputs)
    assert found.placement(640, 480) == model.placement(640, 480)
    assert found.batch_sizes((1, 4)) == model.batch_sizes((1, 4))
    of: dict[str, list[tuple[int, ...]]] = {"resnet50": [(len(model.labels),)], "yolov8n": [(9, 4), (9,), (9,), (9,)]}
    shapes = of[name]
    outputs = [np.zeros(shape, np.float32 if number < 2 else np.int32) for number, shape in enumerate(shapes)]
    given = outputs, Placement(640, 480), Options()
    assert found.postprocess(*given) == model.postprocess(*given)
    assert NormalisedModel.of(found).image_model is found


def test_a_model_of_tensors_that_was_sent_takes_what_the_model_takes() -> None:
    model = ExportedModel("a", "onnx", (), "a.onnx", None, (64,), (INPUT,), (INPUT,), True, (1, 8), None)
    found = sent(model)
    assert isinstance(found, TensorModel)
    assert (found.platform, found.batch_range, found.inputs) == (model.platform, model.batch_range, model.inputs)
    assert (found.probes() == model.probes()).all()
    assert found.original == model


def test_a_file_of_other_weights_is_the_same_model_and_one_of_another_kind_is_not() -> None:
    model = ExportedModel("a", "onnx", (), "a.onnx", None, (64,), (INPUT,), (INPUT,), True, (1, 8), None)
    other = ExportedModel("a", "onnx", (), "a.onnx", None, (64,), (INPUT,), (INPUT,), True, (1, 8), "probes.npz")
    assert described(model) == described(model)
    assert described(model) != described(other)
