"""Normalised tensors as an input: the same network behind the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models import NormalisedModel, Options, Placement, open_model, parse_spec


def opened(architecture):
    return open_model(parse_spec(f"{architecture}:random"), Path("nowhere"))


@pytest.mark.parametrize("architecture", ["resnet18", "yolov8n"])
def test_the_network_answers_as_that_of_images(architecture):
    model = opened(architecture)
    form = NormalisedModel.of(model)
    pixels = np.random.default_rng(0).integers(0, 256, (2, *model.input_shape), dtype=np.uint8)
    items = form.items(pixels)
    assert items.shape == (2, *form.input_shape)
    with torch.inference_mode():
        expected = model.network()(torch.from_numpy(pixels))
        outputs = form.network()(torch.from_numpy(items))
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    reduced = form.reduce([output.numpy() for output in outputs], 0, Options())
    height, width, _ = model.input_shape
    assert set(form.image_model.tensors(reduced, Placement(width, height), Options())) == {
        each.name for each in model.answers
    }


def test_it_has_a_name_that_no_client_can_use():
    form = NormalisedModel.of(opened("resnet18"))
    assert form.name == "resnet18:input"
    assert parse_spec(f"{form.name}=resnet18:random").name == "resnet18"
