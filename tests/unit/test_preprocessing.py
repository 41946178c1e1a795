"""How images come into a network's input: a sidecar's keys, those that files of timm and Hugging Face imply, and the
same by a device's operators.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import functional as transforms

from models import PixelModel, open_model, parse_spec
from models.contract.errors import WeightsError
from models.contract.resize import Centre, Resize, Whole, place
from models.exports import library_files
from models.exports.files import names_beside
from models.exports.image_trial import watched
from models.exports.images import load_parts
from models.exports.metadata import Sidecar, read_sidecar

BLOCKS = np.random.default_rng(0).integers(0, 256, (9, 12, 3)).astype(np.uint8)
PHOTO = Image.fromarray(BLOCKS).resize((200, 150), Image.Resampling.BICUBIC)
KERNEL = Image.Resampling.BICUBIC
NEAREST, OPENCV = {"resize_by": "torch", "interpolation": "nearest"}, {"resize_by": "opencv"}


def placed(resize: Resize, image: Image.Image = PHOTO) -> np.ndarray[Any, Any]:
    out = torch.full((*resize.size, 3), 7, dtype=torch.uint8)
    pixels = torch.from_numpy(np.asarray(image).copy())
    placement = resize.preprocess(pixels, out, image.width, image.height)
    assert placement == resize.placement(image.width, image.height)
    return out.numpy()


def made(usual: Any = "centre", size: tuple[int, int] = (64, 64), **keys: Any) -> Resize:
    return Sidecar.model_validate(keys).resizing(size, usual)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Centre((64, 64), 64)),
        ({"resize_to": 72, "interpolation": "bicubic"}, Centre((64, 64), 72, "bicubic")),
        ({"resize_to": [72, 90], "antialias": False}, Centre((64, 64), 0, antialias=False, shape=(72, 90))),
        ({"resize": "stretch"}, Whole((64, 64), "stretch")),
        ({"resize": "stretch", "resize_by": "torch"}, Whole((64, 64), "stretch", antialias=True, by="torch")),
        ({"resize": "stretch", "crop": 0.5}, Centre((64, 64), 0, shape=(128, 128))),
        ({"resize": "letterbox", "pad": 0}, Whole((64, 64), pad=0)),
        ({"resize": "top-left", "resize_to": 32}, Whole((64, 64), "top-left", shorter=32)),
        ({"resize": "top-left", "multiple_of": 16}, Whole((64, 64), "top-left", multiple_of=16)),
    ],
)
def test_each_key_has_an_effect(keys: dict[str, Any], expected: Resize) -> None:
    assert made(**keys) == expected


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"crop": 0.8, "resize_to": 80}, "same in two ways"),
        ({"resize": "stretch", "resize_to": 80}, '"resize_to" has no effect'),
        ({"pad": 0}, '"pad" has no effect'),
        ({"resize": "stretch", "multiple_of": 16}, '"multiple_of" is for "resize": "top-left"'),
        ({"resize": "top-left", "multiple_of": 65}, "at most the shorter side of the input"),
        ({"resize": "letterbox", "interpolation": "lanczos"}, "does without"),
        ({"resize": "letterbox", "interpolation": "nearest", "antialias": True}, '"antialias": true has no effect'),
        (NEAREST, '"resize_by": "torch" knows no "nearest"'),
        ({**OPENCV, "interpolation": "lanczos"}, '"resize_by": "opencv" knows no "lanczos"'),
        ({"resize_by": "pillow", "antialias": False}, '"antialias": false has no effect'),
        # Decoders would take gigabytes for every image, or end.
        ({"resize_to": 60_000}, '"resize_to" resizes images to 60000 pixels: 1 to 2048'),
        ({"crop": 1e-4}, '"crop" resizes images to 640000 pixels'),
        ({"crop": 4, "size": (2, 2)}, '"crop" resizes images to 0 pixels'),
        ({"resize_to": -5}, "greater than 0"),
        ({"pad": 256}, "less than or equal to 255"),
        *(({key: True}, "should be a valid") for key in ("mean", "pad", "crop")),
        ({"mean": math.nan}, "finite number"),
    ],
)
def test_a_key_without_effect_or_sense_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(**keys)


def test_squash_and_border_are_those_of_pillow() -> None:
    squashed = placed(made(resize="stretch", crop=0.8, interpolation="bicubic", resize_by="pillow"))
    assert (squashed == np.asarray(PHOTO.resize((80, 80), KERNEL).crop((8, 8, 72, 72)))).all()
    bordered = placed(made(resize="letterbox", crop=1, interpolation="bicubic", resize_by="pillow", pad=(1, 2, 3)))
    assert (bordered[8:56] == np.asarray(PHOTO.resize((64, 48), KERNEL))).all()
    assert (bordered[:8] == (1, 2, 3)).all()
    assert (bordered[56:] == (1, 2, 3)).all()


def test_the_shorter_side_is_met_where_the_longer_one_fits() -> None:
    resize = made(size=(96, 96), resize="top-left", resize_to=48, pad=(9, 9, 9), resize_by="torch")
    pixels = placed(resize)
    assert (pixels[48:] == 9).all()
    assert (pixels[:, 64:] == 9).all()
    assert not (pixels[:48, :64] == 9).all(axis=(0, 2)).any()
    strip = resize.fit(resize.placement(400, 50))
    assert strip.boxes(np.array([[0.0, 0, 96, 12]])).round(3).tolist() == [[0, 0, 400, 50]]


@pytest.mark.parametrize("shorter", [0, 50])
def test_boxes_of_sides_rounded_to_a_multiple_cover_the_image(shorter: int) -> None:
    resize = Whole((64, 64), "top-left", shorter, longer=shorter and 64, multiple_of=16)
    geometry = resize.exact_geometry(100, 70)
    assert (geometry.width, geometry.height) == (64, 32)
    fit = resize.fit(resize.placement(100, 70))
    assert fit.boxes(np.array([[0.0, 0, 64, 32]])).round(3).tolist() == [[0, 0, 100, 70]]


@pytest.mark.parametrize("size", [(333, 421), (150, 640), (2000, 20)], ids=str)
@pytest.mark.parametrize("keys", [{}, {"antialias": False}, {"resize_by": "pillow"}, OPENCV, NEAREST], ids=str)
@pytest.mark.parametrize("to", [56, 72])
def test_pixels_of_any_strip_are_those_of_the_library_that_is_stated(keys, to, size):
    image, mode = photograph(*size), transforms.InterpolationMode(keys.get("interpolation", "bilinear"))
    stated, sides = ({"resize": "stretch"}, [64, 64]) if keys == NEAREST else ({"resize_to": to}, [to])
    resized = transforms.resize(image.permute(2, 0, 1), sides, mode, antialias=keys.get("antialias", True))
    if keys == OPENCV:
        resized = torch.from_numpy(cv2.resize(image.numpy(), resized.shape[:0:-1])).permute(2, 0, 1)
    found = placed(made(**keys, **stated), Image.fromarray(image.numpy())).astype(int)
    assert np.abs(found - transforms.center_crop(resized, [64]).permute(1, 2, 0).numpy()).max() <= 1


CLIP = {"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": {"height": 60, "width": 60}, "resample": 3,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.2, 0.2]}  # fmt: skip
DETR = {"image_processor_type": "DetrImageProcessor", "size": {"shortest_edge": 80, "longest_edge": 133},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}  # fmt: skip
YOLOS = {"image_processor_type": "YolosImageProcessor", "size": DETR["size"]}
CONVNEXT = {"image_processor_type": "ConvNextImageProcessor", "resample": 2}


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (CLIP, Centre((60, 60), 64, "bicubic", rounds=False)),
        ({"size": {"height": 64, "width": 48}}, Whole((64, 48), "stretch", antialias=True, by="torch")),
        ({"size": 64, "resample": 1}, Centre((64, 64), 0, "lanczos", True, "pillow", (64, 64), rounds=False)),
        (DETR, Whole((133, 133), "top-left", 80, "bilinear", True, (128, 128, 128), 133, by="torch")),
        (YOLOS, Whole((128, 128), "top-left", 80, "bilinear", True, (124, 116, 104), 133, 16, "torch")),
        ({**CONVNEXT, "size": {"shortest_edge": 64}, "crop_pct": 0.8}, Centre((64, 64), 80, rounds=False)),
        ({**CONVNEXT, "size": {"shortest_edge": 384}}, Whole((384, 384), "stretch", antialias=True, by="torch")),
    ],
)
def test_a_processor_of_hugging_face_says_how_images_come_in(
    tmp_path: Path, processor: dict[str, Any], expected: Resize
) -> None:
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "id2label": {"0": "cat", "1": "dog"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    sidecar = read_sidecar(tmp_path / "model.safetensors")
    assert sidecar is not None
    assert (sidecar.task, sidecar.labels) == ("classify", {0: "cat", 1: "dog"})
    size = library_files.size_in(tmp_path)
    assert size is not None
    assert sidecar.resizing(size, "centre") == expected
    assert (expected.geometry(64, 48) is None) == ("lanczos" in repr(expected))  # No device has it.


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        ({"resample": 0}, ': "nearest"}: state "size", "resize", "resize_by", "interpolation", "mean" and "std" in'),
        ({"crop_pct": 0.9}, '"crop_pct": 0.9 in preprocessor_config.json is nothing that ViTImageProcessor is known'),
        ({"do_resize": False}, '"do_resize": False in preprocessor_config.json gives each image a size of its own'),
        ({"size": 64, "do_pad": True, "pad_size": {"height": 80, "width": 80}}, "would fill up its images"),
        (
            {"image_processor_type": "BitImageProcessor", "size": 518, "do_center_crop": False},
            '{"resize": "stretch", "size": [518, 518]}',
        ),
        ({**YOLOS, "pad_size": {"height": 133, "width": 133}}, '{"resize": "stretch", "size": [480, 640]}'),
        ({**DETR, "pad_size": {"height": 64, "width": 64}}, "has no room for images of 133 pixels"),
    ],
)
def test_what_no_input_of_one_size_can_be_given_is_refused_by_name(
    tmp_path: Path, processor: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(WeightsError, match=re.escape(said)):
        read_sidecar(tmp_path / "model.safetensors")
    own = {"size": [64, 96], "resize": "stretch", "mean": [0.5], "std": [0.25]}
    (tmp_path / "model.json").write_text(json.dumps(own))
    sidecar = read_sidecar(tmp_path / "model.safetensors")
    assert sidecar is not None
    assert (sidecar.size, sidecar.resize, sidecar.mean, sidecar.std) == ((64, 96), "stretch", (0.5,) * 3, (0.25,) * 3)


def test_a_processor_within_another_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    inner = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 64}, "crop_size": 60}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    for other in (None, {"size": 32}):
        if other:
            (tmp_path / "preprocessor_config.json").write_text(json.dumps(other))
        assert library_files.preprocessor_of(tmp_path)["size"] == (60, 60)
    assert {"processor_config.json", "open_clip_config.json"} < set(names_beside(tmp_path / "a.onnx", is_graph=True))
    for file in tmp_path.glob("*processor_config.json"):
        file.unlink()
    with pytest.raises(WeightsError, match=r"preprocessor_config.json is missing"):
        read_sidecar(tmp_path / "model.safetensors")
    (tmp_path / "config.json").unlink()  # The folder of an export is of no library.
    (tmp_path / "mine.json").write_text('{"task": "classify"}')
    clip = {"image_processor_type": "CLIPImageProcessor", **CLIP}
    for name, content in ("preprocessor", clip), ("open_clip", {"preprocess_cfg": {"resize_mode": "shortest"}}):
        (tmp_path / f"{name}_config.json").write_text(json.dumps(content))
        sidecar: Any = read_sidecar(tmp_path / "mine.onnx")
        assert (sidecar.task, sidecar.resize, sidecar.interpolation) == ("classify", "centre", "bicubic")
        (tmp_path / f"{name}_config.json").unlink()


def test_the_longer_side_decides_as_transformers_rounds() -> None:
    resize = made(size=(1333, 1333), resize="top-left", resize_to=(800, 1333), pad=(9, 9, 9), resize_by="torch")
    found = [resize.geometry(*size) for size in ((1000, 251), (251, 1000), (500, 375))]
    found += [made("top-left", (96, 160), resize_to=(96, 160)).geometry(*size) for size in ((100, 300), (300, 100))]
    sizes = [(each.width, each.height) for each in found if each]
    assert sizes == [(1333, 335), (335, 1333), (1066, 800), (32, 96), (160, 53)]


@pytest.mark.parametrize("is_nested", [True, False])
def test_timms_old_and_new_files_say_the_same(tmp_path: Path, is_nested: bool) -> None:
    cfg = {"input_size": [3, 96, 80], "mean": [0.5, 0.5, 0.5], "crop_pct": 1.0, "crop_mode": "squash", "num_classes": 2}
    top = {"architecture": "resnet18"}
    config = (
        {**top, "pretrained_cfg": {**cfg, "label_names": ["a", "b"]}}
        if is_nested
        else {**top, **cfg, "labels": ["a", "b"]}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    sidecar = read_sidecar(tmp_path / "model.safetensors")
    assert sidecar is not None
    assert (sidecar.mean, sidecar.labels, sidecar.resize) == ((0.5,) * 3, ["a", "b"], "stretch")
    assert library_files.size_in(tmp_path) == (96, 80)
    config |= {"label_descriptions": {"a": "an apple", "b": "a bee"}, "problem_type": "multi_label_classification"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sidecar = read_sidecar(tmp_path / "model.safetensors")
    assert sidecar is not None
    assert (sidecar.labels, sidecar.scores) == (["an apple", "a bee"], "sigmoid")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_classes": 0}))
    assert getattr(read_sidecar(tmp_path / "model.safetensors"), "task", "") == "embed"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TIMM_CONFIG = {"architecture": "resnet18", "num_classes": 2, "label_names": ["a", "b"], "pretrained_cfg": {}}
HUGGING_CONFIG = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "id2label": {}, "image_size": 8}
TIMM_KEYS = ("input_size", "crop_mode", "mean", "crop_pct", "interpolation", "std")
HUGGING_KEYS = (
    *("size", "crop_size", "do_center_crop", "do_resize", "resample", "rescale_factor", "rescale_offset", "do_rescale"),
    *("image_mean", "image_std", "do_normalize", "image_processor_type", "crop_pct", "pad_size"),
)


def said(folder: Path, config: object, processor: object = None) -> str:
    """Return the sentences by which a folder is refused, "" where it is read."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    sentences = []
    for read in (
        lambda: read_sidecar(folder / "model.safetensors"),
        lambda: library_files.size_in(folder),
        lambda: library_files.task_of(config) if isinstance(config, dict) else None,
    ):
        try:
            read()
        except WeightsError as error:
            sentences.append(str(error))
    return " ".join(sentences)


@given(st.sampled_from(sorted({*TIMM_CONFIG, *HUGGING_CONFIG})), JSON)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_configuration_is_read_or_refused_in_a_sentence(tmp_path: Path, key: str, value: object) -> None:
    for config in (TIMM_CONFIG, HUGGING_CONFIG):
        assert "\n" not in said(tmp_path, {**config, key: value})


@given(st.dictionaries(st.sampled_from((*TIMM_KEYS, *HUGGING_KEYS)), JSON, max_size=4))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_preprocessing_is_read_or_refused_in_a_sentence(tmp_path: Path, entries: dict[str, object]) -> None:
    assert "\n" not in said(tmp_path, HUGGING_CONFIG, entries)
    assert "\n" not in said(tmp_path, {**TIMM_CONFIG, "pretrained_cfg": entries})


SIZES = [(500, 375), (375, 500), (224, 224), (256, 256), (640, 480), (1280, 1280), (1281, 719), (97, 61), (30, 31)]
SIZES += [(320, 640), (900, 250), (8, 8)]


class Divided(torch.nn.Module):
    """Linear attention: what is divided by is a part of a product, or for a softmax a sum of exponentials."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.queries, self.last, self.linear = torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 2, 1), linear

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        queries = self.queries(pixels).relu()
        products = queries @ queries.transpose(-1, -2)
        divisor = products[..., -1:] + 1e-5 if self.linear else products.exp().sum(-1, keepdim=True)
        found: torch.Tensor = self.last(products / divisor)
        return found


@pytest.mark.filterwarnings("ignore")  # Both old exporters say that they are.
@pytest.mark.parametrize("linear", [True, False], ids=["by a product", "by a sum of exponentials"])
@pytest.mark.parametrize("ending", ["onnx", "pt2", "ts"])
def test_an_export_that_divides_by_products_is_served_in_float32(tmp_path: Path, ending: str, linear: bool) -> None:
    network, pixels, file = Divided(linear).eval(), torch.rand(1, 3, 8, 8), tmp_path / f"mine.{ending}"
    if ending == "pt2":
        torch.export.save(torch.export.export(network, (pixels,)), file)
    elif ending == "ts":
        torch.jit.trace(network, pixels).save(file)
    else:
        torch.onnx.export(network, (pixels,), file, dynamo=False)
    core = load_parts(str(file), ending, False)[0]
    assert watched(core, lambda: core(pixels)) == (linear, True)


def photograph(width, height):
    """Smooth and sharp parts, as of a photograph: uint8 [height, width, 3]."""
    rng = np.random.default_rng(width * 7919 + height)
    coarse = rng.integers(0, 256, (1, 3, 7, 9)).astype(np.float32)
    smooth = torch.nn.functional.interpolate(torch.from_numpy(coarse), (height, width), mode="bicubic")[0]
    noise = torch.from_numpy(rng.normal(0, 12, (3, height, width)).astype(np.float32))
    return (smooth + noise).clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()


RESIZES = {
    name: cast(PixelModel, open_model(parse_spec(f"{name}:random"), Path("nowhere"))).file.resize
    for name in ("resnet50", "efficientnet_b0", "efficientnet_b3", "yolov8n")
} | {how: Whole((320, 416), how) for how in ("letterbox", "stretch", "top-left")}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("resize", RESIZES.values(), ids=RESIZES)
def test_a_device_places_an_image_as_a_decoder_does(resize, size):
    """The bicubic kernel's second pass makes two levels of one that the first has rounded otherwise."""
    image = photograph(*size)
    host, device = (torch.full((*resize.size, 3), 7, dtype=torch.uint8) for _ in range(2))
    assert resize.preprocess(image, host, *size) == resize.placement(*size)
    place(image.permute(2, 0, 1).contiguous(), resize.geometry(*size), device)
    difference = (host.to(torch.int16) - device.to(torch.int16)).abs()
    assert difference.max() <= (2 if resize.interpolation == "bicubic" else 1)
    assert difference.float().mean() < 0.35


@given(size=st.tuples(st.integers(1, 9000), st.integers(1, 9000)))
@example(size=(2800, 450))
def test_a_jpeg_that_is_stretched_is_decoded_in_full_or_at_six_times_the_input(size: tuple[int, int]) -> None:
    for side, decoded, least in zip(size, Whole((224, 160), "stretch").decode_size(*size), (160, 224), strict=True):
        assert decoded in (side, max(decoded, 6 * least))
    assert Centre((8, 8), 8, antialias=False).decode_size(*size) == size
