"""What a device does to an image, on the CPU: the same as what decoders do, but for rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models import ModelSpec, open_model
from models.contract.geometry import place
from models.contract.resize import Whole

SIZES = [(500, 375), (375, 500), (224, 224), (256, 256), (640, 480), (1280, 1280), (1281, 719), (97, 61), (30, 31)]
SIZES += [(320, 640), (900, 250), (8, 8)]


def photograph(width, height):
    """Smooth and sharp parts, as of a photograph: uint8 [height, width, 3]."""
    rng = np.random.default_rng(width * 7919 + height)
    coarse = rng.integers(0, 256, (1, 3, 7, 9)).astype(np.float32)
    smooth = torch.nn.functional.interpolate(torch.from_numpy(coarse), (height, width), mode="bicubic")[0]
    noise = torch.from_numpy(rng.normal(0, 12, (3, height, width)).astype(np.float32))
    return (smooth + noise).clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()


def both(resize, width, height):
    """Pixels by `preprocess` and by `place`, and the placement."""
    image = photograph(width, height)
    host, device = (torch.full((*resize.size, 3), 7, dtype=torch.uint8) for _ in range(2))
    placement = resize.preprocess(image, host, width, height)
    place(image.permute(2, 0, 1).contiguous(), resize.geometry(width, height), device)
    assert placement == resize.placement(width, height)
    return host.to(torch.int16), device.to(torch.int16)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0", "efficientnet_b3", "yolov8n"])
def test_a_device_places_an_image_as_a_decoder_does(name, size):
    """The bicubic kernel's second pass makes two levels of one that the first has rounded otherwise."""
    model = open_model(ModelSpec(name, name, "random"), Path("nowhere"))
    host, device = both(model.file.resize, *size)
    difference = (host - device).abs()
    assert difference.max() <= (2 if getattr(model.file.resize, "interpolation", "") == "bicubic" else 1)
    assert difference.float().mean() < 0.35


@pytest.mark.parametrize("resize", ["letterbox", "stretch", "top-left"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_so_it_does_for_exported_detectors(resize, size):
    host, device = both(Whole((320, 416), resize), *size)
    assert (host - device).abs().max() <= 1


def test_long_strips_are_left_to_decoders():
    model = open_model(ModelSpec("resnet50", "resnet50", "random"), Path("nowhere"))
    assert model.geometry(6000, 100) is None
    assert open_model(ModelSpec("yolov8n", "yolov8n", "random"), Path("nowhere")).geometry(6000, 100)
