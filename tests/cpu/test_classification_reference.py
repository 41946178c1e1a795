"""Classifiers answer as torchvision does: the same logits from the same weights, in every architecture."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import models as torchvision_models
from torchvision.transforms import functional as transforms

from tests.support.classifiers import classifier, preprocessed, saved, torchvision_network
from tests.support.photographs import PHOTOGRAPHS

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("sklearn", "ultralytics")),
    reason="the photographs come with scikit-learn and ultralytics",
)


@pytest.mark.parametrize("photograph", PHOTOGRAPHS)
@pytest.mark.parametrize("megapixels", [5, 12, 24])
def test_a_reduced_decode_changes_little(photograph: str, megapixels: int) -> None:
    small = Image.fromarray(PHOTOGRAPHS[photograph]())
    factor = (megapixels * 1e6 / (small.width * small.height)) ** 0.5
    large = small.resize((int(small.width * factor), int(small.height * factor)), Image.Resampling.LANCZOS)
    encoded = io.BytesIO()
    large.save(encoded, "JPEG", quality=90)
    model = classifier("resnet50")
    in_full = np.array(Image.open(encoded))
    reduced = Image.open(encoded)
    reduced.draft("RGB", model.decode_size(*large.size))
    expected = preprocessed(model, in_full)
    found = preprocessed(model, np.array(reduced), large.size[::-1])
    difference = (found.int() - expected.int()).abs().float()
    if megapixels >= 12:
        assert reduced.width < large.width
    assert difference.mean() <= 0.3
    assert difference.max() <= 8


def test_resnet50_gives_torchvisions_logits_on_photographs(tmp_path: Path) -> None:
    theirs = torchvision_network("resnet50")
    model = classifier("resnet50", "weights.safetensors", saved(theirs, tmp_path))
    declared = torchvision_models.ResNet50_Weights.DEFAULT.transforms()
    photographs = [load() for load in PHOTOGRAPHS.values()]
    pixels = torch.stack([preprocessed(model, image) for image in photographs])
    on_our_pixels = transforms.normalize(pixels.permute(0, 3, 1, 2) / 255, declared.mean, declared.std)
    on_their_pixels = torch.stack([declared(torch.from_numpy(image).permute(2, 0, 1)) for image in photographs])
    with torch.inference_mode():
        (found,) = model.network()(pixels)
        expected, whole = theirs(on_our_pixels), theirs(on_their_pixels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(found, whole, rtol=0, atol=2e-2 * float(whole.abs().max()))
    assert found.argmax(1).tolist() == whole.argmax(1).tolist()


@pytest.mark.parametrize(
    ("architecture", "unfused"),
    [
        ("resnet18", 0),
        ("mobilenet_v3_small", 0),
        ("efficientnet_b0", 0),
        ("googlenet", 0),
        ("densenet121", 62),  # its BatchNorm comes before the convolution
        ("mnasnet0_5", 0),
        ("shufflenet_v2_x0_5", 0),
        ("regnet_x_400mf", 0),
        ("squeezenet1_1", 0),
        ("swin_t", 0),
        ("vit_b_32", 0),
    ],
)
def test_any_classifier_gives_torchvisions_logits(tmp_path: Path, architecture: str, unfused: int) -> None:
    theirs = torchvision_network(architecture)
    model = classifier(architecture, "weights.safetensors", saved(theirs, tmp_path))
    network = model.network()
    pixels = preprocessed(model, PHOTOGRAPHS["china"]())
    with torch.inference_mode():
        (found,) = network(pixels[None])
        expected = theirs(transforms.normalize(pixels.permute(2, 0, 1) / 255, model.mean, model.std)[None])
    assert float(expected.std()) > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert sum(isinstance(module, nn.BatchNorm2d) for module in network.modules()) == unfused
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert not network.training
