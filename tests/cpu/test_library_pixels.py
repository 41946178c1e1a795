"""Pixels of every image processor of transformers and of every data configuration of timm, one by one with theirs.

Each processor is built of files with few keys and many, as old and new versions write them. What a file says is either
given to the network, pixel for pixel, or refused by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.contract.errors import WeightsError
from models.exports import library_files
from models.exports.answers import Entry, entered
from models.exports.metadata import Sidecar, sidecar_of
from models.exports.processors import PROCESSORS, Processor, pixels_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

SIZES = ((500, 375), (333, 421), (97, 61), (1000, 251), (64, 64))
"""Width and height: odd, upright, smaller than the input, long, square."""
EQUAL = 1e-5
LEVELS = 3.01
"""Of processors that resize without averaging, or numbers that they do not round."""
IMAGE_TASKS = (
    *("MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_OBJECT_DETECTION", "MODEL_FOR_SEMANTIC_SEGMENTATION"),
    *("MODEL_FOR_DEPTH_ESTIMATION", "MODEL_FOR_UNIVERSAL_SEGMENTATION", "MODEL_FOR_INSTANCE_SEGMENTATION"),
)


@cache
def photograph(size: tuple[int, int]) -> Image.Image:
    blocks = np.random.default_rng(size[0]).integers(0, 256, (12, 16, 3)).astype(np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.BICUBIC)


def ours(sidecar: Sidecar, image: Image.Image) -> torch.Tensor:
    """Return the input that our preprocessing makes of an image, [3, height, width]."""
    size = (sidecar.size, sidecar.size) if isinstance(sidecar.size, int) else sidecar.size
    assert size is not None
    placed = torch.zeros((*size, 3), dtype=torch.uint8)
    sidecar.resizing(size, "centre").preprocess(torch.from_numpy(np.array(image)), placed, *image.size)
    mean, std = (
        torch.tensor(each or fallback) for each, fallback in ((sidecar.mean, (0,) * 3), (sidecar.std, (1,) * 3))
    )
    return entered(Entry(bgr=sidecar.channels == "bgr"), ((placed.float() / 255 - mean) / std).permute(2, 0, 1))


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


EDGES = {"shortest_edge": 72, "longest_edge": 96}
CUT = {"do_center_crop": True, "crop_size": {"height": 64, "width": 48}}
FILES: tuple[dict[str, Any], ...] = (
    {},
    {"size": 72, "crop_size": 64},
    {"size": [72, 56]},
    {"size": square(72)},
    {"size": square(64)},
    {"size": {"height": 72, "width": 57}, **CUT},
    {"size": {"shortest_edge": 72}, **CUT},
    {"size": {"shortest_edge": 72}, "do_center_crop": True, "crop_size": {"height": 81, "width": 65}},
    {"size": {"shortest_edge": 72}, "do_center_crop": False},
    {"size": EDGES},
    {"size": {"shortest_edge": 72, "longest_edge": 200}, "pad_size": square(224)},
    {"size": EDGES, "pad_size": square(80)},
    {"size": {"max_height": 64, "max_width": 96}},
    *({"size": size, **CUT, "do_pad": True, "pad_size": square(96)} for size in (square(72), {"shortest_edge": 72})),
    {"size": square(72), "do_pad": True, "pad_size": square(96)},
    {"size": square(72), "pad_size": square(96)},
    {"size": square(72), "do_rescale": False, "rescale_offset": True},
    {"size": square(72), **CUT, "do_pad": True},
    {"size": square(72), "image_mean": [0.5] * 3, "image_std": [0.25] * 3},
    {"size": square(72), "do_rescale": False},
    {"size": square(72), "do_normalize": False},
    {"size": square(72), "do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.2, 0.1]},
    {"size": square(72), "rescale_factor": 1 / 127.5},
    *({"size": square(72), "resample": kernel} for kernel in range(6)),
    *({"size": {"shortest_edge": 72}, **CUT, "resample": kernel} for kernel in range(4)),
    {"size": square(72), "do_resize": False},
    {"size": square(72), "do_flip_channel_order": False},
    {"size": {"shortest_edge": 72}, **CUT, "crop_pct": 0.8},
    {"size": square(70), "keep_aspect_ratio": True},
    {"size": {"height": 75, "width": 93}, "ensure_multiple_of": 14},
    {"size": square(70), "do_pad": True, "size_divisor": 32},
    {"size": square(72), "rescale_offset": True},
    {"size": square(72), "include_top": False},
    *({"size": square(72), **CUT, f"do_{step}": None} for step in ("resize", "rescale", "normalize", "center_crop")),
    {"size": square(72), **CUT, "crop_pct": None},
    *({"size": 72, "default_to_square": is_square, "do_center_crop": False} for is_square in (False, True)),
)


@cache
def processors() -> dict[str, str]:
    """Image processors by the names of their classes, each with the `model_type` of a network that has it."""
    transformers.logging.set_verbosity_error()
    from transformers.models.auto import image_processing_auto, modeling_auto

    found: dict[str, str] = {}
    served = {name for task in IMAGE_TASKS for name in getattr(modeling_auto, f"{task}_MAPPING_NAMES")}
    for model_type, classes in image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.items():
        name = classes.get("torchvision") or classes.get("pil")
        if model_type in served or name.removesuffix("ImageProcessor") in PROCESSORS:
            found.setdefault(name, model_type)
    found.pop("TimmWrapperImageProcessor")  # timm's own pixels, below.
    return found


def theirs(processor: Any, image: Image.Image) -> torch.Tensor | None:
    """Return the library's input; None where it refuses, or answers with something else than one image."""
    try:
        found = processor(image, return_tensors="pt")["pixel_values"]
    except Exception:  # Whatever the library makes of a file that makes no sense.
        return None
    return found[0] if isinstance(found, torch.Tensor) and found.ndim == 4 and found.shape[:2] == (1, 3) else None


def difference(name: str, file: Mapping[str, Any]) -> float | None:
    """Return the largest difference over all sizes, in normalised pixels; None for a file that either side refuses."""
    kind = PROCESSORS.get(name.removesuffix("ImageProcessor"))
    written = {"image_processor_type": name, **file}
    try:
        sidecar = sidecar_of({"task": "classify", **pixels_of(written, processors()[name], "the file")}, "the file")
        ours(sidecar, photograph(SIZES[0]))
    except WeightsError as error:
        keys = (*written, *(kind.given if kind else ()))
        return None if name in str(error) or any(f'"{key}"' in str(error) for key in keys) else math.inf
    assert kind is not None
    processor = getattr(transformers, name).from_dict(json.loads(json.dumps(written)))
    found = []
    for size in SIZES:
        expected = theirs(processor, photograph(size))
        if expected is None:
            return None
        given = ours(sidecar, photograph(size))
        if (kind.masks or kind.multiple_of) and given.shape != expected.shape:
            given = given[:, : expected.shape[1], : expected.shape[2]]
        assert given.shape == expected.shape, (name, file, size)
        found.append(float((given - expected).abs().max()))
    return max(found)


def tolerance(kind: Processor, file: Mapping[str, Any]) -> float:
    """Nothing but the last digits, or levels where other software resizes: of what is not averaged or rounded there, by
    Lanczos, and of what fills up an image that has a mask.
    """
    std = float(min(file.get("image_std") or kind.given.get("image_std", (1.0,))))
    levels = 0.0 if kind.antialias and not kind.floats else LEVELS
    levels = max(levels, 1.01 if file.get("resample") == 1 else 0.0, 0.51 if "pad_size" in file and kind.masks else 0.0)
    largest = float(file.get("rescale_factor", 1 / 255)) if file.get("do_rescale", True) else 1.0
    divided = std**2 if "include_top" in kind.keys else std
    return EQUAL * largest * 255 + levels * largest / divided


def test_every_processor_is_given_pixel_for_pixel_or_refused_by_name() -> None:
    wrong, compared = [], dict.fromkeys(PROCESSORS, 0)
    for name in sorted(processors()):
        short = name.removesuffix("ImageProcessor")
        for file in FILES:
            found = difference(name, file)
            if found is None:
                continue
            compared[short] += 1
            if found > tolerance(PROCESSORS[short], file):
                wrong.append((name, file, found))
    assert not wrong
    assert not [name for name, count in compared.items() if not count]


def test_networks_without_a_named_processor_have_that_of_the_library() -> None:
    from transformers.models.auto import image_processing_auto

    for model_type, classes in image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.items():
        name = str(classes.get("torchvision") or classes.get("pil")).removesuffix("ImageProcessor")
        for known, kind in PROCESSORS.items():
            assert model_type not in kind.models or known == name, model_type


def test_every_data_configuration_of_timm_is_given_pixel_for_pixel() -> None:
    configurations = {}
    for name in timm.list_pretrained():
        cfg = timm.get_pretrained_cfg(name).to_dict()
        data = timm.data.resolve_data_config(pretrained_cfg=cfg)
        configurations[json.dumps(data, sort_keys=True)] = (name, cfg, data)
    assert len(configurations) > 50
    for name, cfg, data in configurations.values():
        transform: Any = timm.data.create_transform(**data)
        sidecar = sidecar_of(
            {"task": "classify", **library_files.timm_preprocessing(json.loads(json.dumps(cfg)))}, name
        )
        for size in SIZES:
            given, expected = ours(sidecar, photograph(size)), transform(photograph(size))
            assert given.shape == expected.shape, name
            assert float((given - expected).abs().max()) <= EQUAL, (name, size)
