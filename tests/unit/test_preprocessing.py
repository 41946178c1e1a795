"""How images come into a network's input: a sidecar's keys, and those that files of timm and Hugging Face imply."""

from __future__ import annotations

import json
import math
import re
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from anychip_base.extras import NOT_INSTALLED
from models import open_model, parse_spec
from models.contract.errors import WeightsError
from models.contract.resize import Centre, Resize, Whole
from models.exports import library_files
from models.exports.files import names_beside
from models.exports.image_trial import example
from models.exports.metadata import Sidecar, read_sidecar

onnx = pytest.importorskip("onnx")

BLOCKS = np.random.default_rng(0).integers(0, 256, (9, 12, 3)).astype(np.uint8)
PHOTO = Image.fromarray(BLOCKS).resize((200, 150), Image.Resampling.BICUBIC)
KERNEL = Image.Resampling.BICUBIC


def onnx_file(file: Path, taken: tuple[int, ...], given: list[tuple[int, ...]]) -> Path:
    """Write a file that states these shapes, and answers with noise."""
    kind = onnx.TensorProto.FLOAT
    info = onnx.helper.make_tensor_value_info
    nodes = [
        onnx.helper.make_node("RandomNormal", [], [f"y{number}"], shape=shape) for number, shape in enumerate(given)
    ]
    outputs = [info(f"y{number}", kind, shape) for number, shape in enumerate(given)]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [info("x", kind, taken)], outputs)), file)
    return file


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
        ({"resize": "stretch", "resize_by": "torch"}, Whole((64, 64), "stretch", antialias=True)),
        ({"resize": "stretch", "crop": 0.5}, Centre((64, 64), 0, shape=(128, 128))),
        ({"resize": "letterbox", "pad": 0}, Whole((64, 64), pad=0)),
        ({"resize": "top-left", "resize_to": 32}, Whole((64, 64), "top-left", shorter=32)),
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
        ({"resize": "top-left", "crop": 0.9}, '"crop" has no effect'),
        ({"resize": "stretch", "resize_by": "pillow"}, '"resize_by": "pillow" has no effect'),
        ({"resize": "letterbox", "interpolation": "lanczos"}, "does without"),
        # Decoders would take gigabytes for every image, or end.
        ({"resize_to": 60_000}, '"resize_to" resizes images to 60000 pixels: 1 to 2048'),
        ({"crop": 1e-4}, '"crop" resizes images to 640000 pixels'),
        ({"crop": 1e-320}, '"crop" resizes images to inf pixels'),
        ({"crop": 4, "size": (2, 2)}, '"crop" resizes images to 0 pixels'),
        ({"resize_to": -5}, "greater than 0"),
        ({"pad": 256}, "less than or equal to 255"),
        ({"std": 0}, "greater than 0"),
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


CLIP = {"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": {"height": 60, "width": 60}, "resample": 3,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.2, 0.2]}  # fmt: skip
DETR = {"image_processor_type": "DetrImageProcessor", "size": {"shortest_edge": 80, "longest_edge": 133},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}  # fmt: skip
CONVNEXT = {"image_processor_type": "ConvNextImageProcessor", "resample": 2}


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (CLIP, Centre((60, 60), 64, "bicubic", rounds=False)),
        ({"size": {"height": 64, "width": 48}}, Whole((64, 48), "stretch", antialias=True)),
        ({"size": 64, "resample": 1}, Centre((64, 64), 0, "lanczos", True, "pillow", (64, 64), rounds=False)),
        (DETR, Whole((133, 133), "top-left", shorter=80, antialias=True, pad=(128, 128, 128), longer=133)),
        ({**CONVNEXT, "size": {"shortest_edge": 64}, "crop_pct": 0.8}, Centre((64, 64), 80, rounds=False)),
        ({**CONVNEXT, "size": {"shortest_edge": 384}}, Whole((384, 384), "stretch", antialias=True)),
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


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (
            {"image_processor_type": "DonutImageProcessor"},
            "DonutImageProcessor in preprocessor_config.json is no image",
        ),
        (
            {"crop_pct": 0.9},
            '"crop_pct": 0.9 in preprocessor_config.json is nothing that ViTImageProcessor is known to take',
        ),
        ({"do_flip_channel_order": True}, '"do_flip_channel_order": True in'),
        ({"do_resize": False}, '"do_resize": False in preprocessor_config.json gives each image a size of its own'),
        ({"size": {"shortest_edge": 224}}, "gives each image a size of its own"),
        ({"size": 64, "do_pad": True, "pad_size": {"height": 80, "width": 80}}, "would fill up images of 64 x 64"),
        ({"image_processor_type": "DPTImageProcessor", "keep_aspect_ratio": True}, '"keep_aspect_ratio": True'),
        ({"image_processor_type": "YolosImageProcessor"}, '{"resize": "stretch", "size": [480, 640]}'),
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
    assert "processor_config.json" in names_beside(tmp_path / "a.safetensors", is_graph=True)
    for file in tmp_path.glob("*processor_config.json"):
        file.unlink()
    with pytest.raises(WeightsError, match=r"preprocessor_config.json is missing.*processor.save_pretrained"):
        read_sidecar(tmp_path / "model.safetensors")


def test_a_mask_that_an_export_has_no_input_for_is_missed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "detr", "architectures": ["DetrForObjectDetection"]})
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(DETR))
    with pytest.raises(WeightsError, match=r'state {"resize": "stretch", "size": \[133, 133\]}.* in model.json'):
        read_sidecar(tmp_path / "model.onnx")
    (tmp_path / "model.json").write_text(json.dumps({"resize": "stretch"}))
    assert read_sidecar(tmp_path / "model.onnx")


def test_the_longer_side_decides_as_transformers_rounds() -> None:
    resize = made(size=(1333, 1333), resize="top-left", resize_to=(800, 1333), pad=(9, 9, 9), resize_by="torch")
    found = [resize.geometry(*size) for size in ((1000, 251), (251, 1000), (500, 375))]
    assert [(each.width, each.height) for each in found if each] == [(1333, 335), (335, 1333), (1066, 800)]


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


def test_a_folder_of_a_library_that_is_not_built_here_says_which_export_it_wants(tmp_path: Path) -> None:
    folder = tmp_path / "unet"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_model_class": "Unet", "encoder_name": "resnet18", "classes": 2}))
    with pytest.raises(
        WeightsError, match=r"segmentation_models_pytorch.from_pretrained.*\"task\": \"segment_semantic\""
    ):
        open_model(parse_spec(f"x={folder}"), tmp_path)
    (folder / "config.json").unlink()
    cfg = {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1], "resize_mode": "squash", "interpolation": "bilinear"}
    config = {"model_cfg": {"vision_cfg": {"image_size": 384}}, "preprocess_cfg": cfg}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"open_clip.create_model\(.*1, 3, 384, 384.*in mine.json") as error:
        open_model(parse_spec(f"x={folder}"), tmp_path)
    stated = json.loads(re.findall(r"{.*}", str(error.value))[0])
    assert (stated["mean"], stated["resize"]) == ([0.1, 0.2, 0.3], "stretch")
    assert Sidecar.model_validate(stated).resizing((64, 64), "centre").size == (64, 64)


def test_without_the_package_that_builds_it_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library_files.builder.cache_clear()
    monkeypatch.setattr(library_files, "entry_points", lambda _: EntryPoints())
    with pytest.raises(WeightsError, match=re.escape(NOT_INSTALLED)):
        library_files.builder()


def test_a_configuration_of_something_else_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"size": 3}')
    assert read_sidecar(tmp_path / "best.onnx") is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="cannot be read as JSON"):
        read_sidecar(tmp_path / "best.onnx")


def test_no_number_of_a_folder_s_configuration_is_nan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "a", "time_step_limit": [0, Infinity]}')
    assert library_files.config_of(tmp_path)["time_step_limit"] == [0, math.inf]
    (tmp_path / "config.json").write_text('{"layer_norm_eps": NaN}')
    with pytest.raises(WeightsError, match=r"config\.json cannot be read as JSON: a number in it is NaN"):
        library_files.config_of(tmp_path)


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


def test_keys_are_refused_where_the_task_does_not_know_them(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"task": "tensors", "size": 64}')
    with pytest.raises(WeightsError, match="'size' has no effect on tensors"):
        read_sidecar(tmp_path / "best.onnx")
    (tmp_path / "best.json").write_text('{"task": "classify", "sise": 64}')
    with pytest.raises(WeightsError, match="sise"):
        read_sidecar(tmp_path / "best.onnx")


@pytest.mark.parametrize(
    ("outputs", "task", "more"),
    [
        ([(1, 5)], "classify", "its 5 labels, one a line, into best.labels.txt"),
        ([(1, 1)], "regress", ""),
        ([(1, 9, 64, 64)], "segment_semantic", "its 9 labels"),
        ([(1, 1, 64, 64)], "depth", ""),
        ([(1, 17, 384)], "embed", ""),
        ([(1, 300, 92), (1, 300, 4)], "detect", ""),
    ],
)
def test_the_sidecar_to_write_is_made_from_the_file(
    tmp_path: Path, outputs: list[tuple[int, ...]], task: str, more: str
) -> None:
    said = example(onnx_file(tmp_path / "best.onnx", (1, 3, 48, 64), outputs))
    assert json.dumps({"task": task, "size": [48, 64]}) in said
    assert more in said
