"""Exported files as image models: Ultralytics' own predictions from the same files, and files of other layouts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import WeightsError, open_model, parse_spec
from models.contract.resize import Centre
from tests.support import library_folders, small_classifier
from tests.support.export_comparison import compare, exported, written_images
from tests.support.exports_of_networks import answered, written
from tests.support.exports_of_networks import opened as model_of
from tests.support.ultralytics_exports import NETWORKS

pytest.importorskip("onnx")
# In `make test` one of each task and of each way through the code; `make nightly` has all.
USUAL = ["v8-detect", "v8-nms", "26-end-to-end", "v8-segment", "v8-pose", "v8-obb", "v8-classify"]
USUAL += ["v8-openvino"] if importlib.util.find_spec("openvino") else []


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_images(tmp_path_factory.mktemp("images"), 16)


@pytest.fixture(scope="module")
def many_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_images(tmp_path_factory.mktemp("many"), 50)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Path:
    pytest.importorskip("ultralytics")
    return exported(tmp_path_factory.mktemp("usual"), images, USUAL)


def check(worst: dict[str, float], lost: float = 0.005) -> None:
    assert worst["instances"] >= 16
    # Untrained networks have scores at the threshold and pairs at the limit of overlap, where the last digit decides.
    assert worst["lost"] <= max(2, lost * worst["instances"])
    assert worst.get("keypoint", 0) <= 1
    assert worst.get("probability", 0) <= 1e-3
    assert worst.get("mask in its box", 0) <= 0.01


@pytest.mark.parametrize("tag", USUAL)
def test_it_answers_as_ultralytics_from_the_same_file(usual: Path, images: Path, tag: str) -> None:
    check(compare(usual, images, tag))


@pytest.mark.nightly
@pytest.mark.parametrize("tag", sorted(NETWORKS))
def test_every_family_answers_as_ultralytics(tmp_path: Path, many_images: Path, tag: str) -> None:
    pytest.importorskip("ultralytics")
    # In images with more than the 300 instances that are answered, the order of adding decides which these are.
    check(compare(exported(tmp_path, many_images, [tag], side=640), many_images, tag), lost=0.02)


# Files that say nothing of themselves


class Head(nn.Module):
    """A network with an output of a shape: 0 to 10 everywhere, so that no box has a side below 0."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1, bias=False)
        self.values = nn.Parameter(torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.values + self.conv(x).mean((1, 2, 3)).reshape(-1, *[1] * (self.values.ndim - 1))
        return values


IMAGE = torch.rand(1, 3, 64, 64)
ANCHORS = 8 * 8 + 4 * 4 + 2 * 2


@pytest.mark.parametrize(
    ("shape", "sidecar", "layout"),
    [
        ((1, 3 * ANCHORS, 5 + 2), {"task": "detect", "labels": ["a", "b"]}, "yolov5"),
        ((1, 4 + 2, ANCHORS), {"task": "detect", "layout": "yolov8", "labels": ["a", "b"]}, "yolov8"),
        ((1, ANCHORS, 5 + 2), {"task": "detect", "layout": "yolox"}, "yolox"),
        ((1, 300, 6), {"task": "detect"}, "rows"),
        ((1, 300, 4 + 3), {"task": "detect", "layout": "rtdetr"}, "rtdetr"),
        ((1, 7), {"task": "classify"}, "classes"),
    ],
)
def test_a_sidecar_says_what_the_file_does_not(
    tmp_path: Path, shape: tuple[int, ...], sidecar: dict[str, Any], layout: str
) -> None:
    head = Head(*shape)
    values = head.values.data.mT if layout == "yolov8" else head.values.data
    head.conv.weight.data /= 30_000  # YOLOX gets levels.
    if layout != "classes":  # Numbers that the layout can have.
        values[..., 4:] = 0.5 + values[..., 4:] / 100
    values[..., :2] *= 6.4 if layout.startswith("yolov") else 1  # Candidates are all over the image.
    if layout == "yolox":  # Exponents of sides.
        values[..., 2:4] /= 10
    if layout == "rtdetr":
        values[..., :4] /= 10
    if layout == "rows":  # Two corners: the second one lies behind the first.
        values[..., 2:4] += values[..., :2]
        values[..., 5] = 1
    model = model_of(written(tmp_path / "best.onnx", head, IMAGE, sidecar))
    assert (model.task, model.export.how.layout) == (sidecar["task"], layout)
    assert (model.export.entry.levels, model.export.entry.bgr) == (layout == "yolox",) * 2
    answer = answered(model, torch.zeros((2, 64, 64, 3), dtype=torch.uint8), model.placement(64, 48), 1)
    assert answer["width"] == 64
    for found in answer.get("detections", ()):
        assert 0 <= found["box"]["x1"] <= found["box"]["x2"] <= 64


class Unrolled(nn.Module):
    """A detector of red images, which finds nothing elsewhere; its loop over images was traced with one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        red = (x[:1, 0].mean() - x[:1, 1].mean() > 0.8).float()
        box = torch.tensor([8.0, 8, 40, 40, 0.9, 1]) * red
        found = torch.zeros(x.shape[0], 300, 6)
        found[0, 0] = box
        return found


def test_boxes_of_images_beyond_those_of_the_export_are_not_lost(tmp_path: Path) -> None:
    """As `nms=True` of Ultralytics writes its loop: neither noise nor pictures without an object show it."""
    beside = {"task": "detect", "size": 64, "layout": "rows", "labels": ["a", "b"]}
    model = model_of(written(tmp_path / "best.torchscript", Unrolled(), IMAGE, beside))
    assert model.export.batch == (1, 1)
    pixels = torch.zeros((2, 64, 64, 3), dtype=torch.uint8)
    pixels[..., 0] = 255
    for row in range(2):
        assert len(answered(model, pixels, model.placement(64, 64), row)["detections"]) == 1


@pytest.mark.parametrize("form", ["weights", "inputs and outputs", "script"])
def test_a_file_of_halves_is_computed_from_its_weights(tmp_path: Path, form: str) -> None:
    """As `half=True` writes it on a CPU, with casts after the input and before the output, and on a GPU, without."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    layers[0].weight.data = torch.linspace(-1, 1, 108).reshape(4, 3, 3, 3)
    sidecar = {"task": "classify", "size": 64, "labels": ["a", "b", "c", "d"]}
    file = written(tmp_path / "best.onnx", layers, IMAGE, sidecar)
    pixels = torch.randint(256, (2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    [expected] = model_of(file).network()(pixels)
    if form == "script":
        file = written(tmp_path / "best.torchscript", layers.half(), IMAGE.half())
    else:
        import onnx

        float16 = pytest.importorskip("onnxruntime.transformers.float16")
        halves = float16.convert_float_to_float16(onnx.load(file), keep_io_types=form == "weights")
        assert {weight.data_type for weight in halves.graph.initializer} == {onnx.TensorProto.FLOAT16}
        onnx.save(halves, file)
    [found] = model_of(file).network()(pixels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)


class Floats(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given.float()


class DividesItself(nn.Module):
    """A classifier that takes levels of 0 to 255, of whatever type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        return self.layers((levels.float() / 255 - 0.5) / 0.25)  # type: ignore[no-any-return]


def test_a_script_of_bytes_or_floats_gets_levels_if_it_divides_them_and_is_asked_about_if_not(tmp_path: Path) -> None:
    network = DividesItself().eval()
    file = written(tmp_path / "mine.ts", network, torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    sidecar = {"task": "classify", "size": 64, "labels": ["a", "b", "c", "d"], "scores": "logits"}
    pixels = torch.randint(256, (2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def answers(**more: Any) -> tuple[torch.Tensor, Any]:
        (tmp_path / "mine.json").write_text(json.dumps({**sidecar, **more}))
        model = model_of(file)
        with torch.inference_mode():
            [found] = model.network()(pixels)
        return found, model.export.entry

    for stated in ({}, {"input": "levels"}):
        found, entry = answers(**stated)
        assert entry.levels
        assert entry.of_bytes
        torch.testing.assert_close(found, network(pixels.permute(0, 3, 1, 2)), atol=1e-4, rtol=1e-4)
    found, entry = answers(input="floats", mean=0, std=1)
    assert not entry.levels
    torch.testing.assert_close(found, network(pixels.permute(0, 3, 1, 2) / 255), atol=1e-4, rtol=1e-4)
    plain = nn.Sequential(Floats(), network.layers).eval()
    written(file, plain, torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    with pytest.raises(WeightsError, match=r'uint8.*state "input": "levels".* or "floats"'):
        answers()


def test_a_script_is_computed_in_the_precision_that_is_asked_for(tmp_path: Path) -> None:
    """Its own weights, too: they are no Parameters, which `Module.to` would cast or move."""
    model: Any = open_model(parse_spec(small_classifier.written(tmp_path)), tmp_path)
    pixels = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    network = model.network()
    [expected] = network(pixels)
    assert {each.dtype for each in network.cast(torch.bfloat16).core.module.parameters()} == {torch.bfloat16}
    [found] = network(pixels)
    assert 0 < (found - expected).abs().max() < 0.1


def test_a_classifier_of_the_yolov5_repository_sees_the_centre_as_its_own_program_cuts_it(tmp_path: Path) -> None:
    """utils/augmentations.py, CenterCrop: the square in full resolution, then cv2.resize, which never averages."""
    import cv2
    import onnx

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    file = written(tmp_path / "best.onnx", network, torch.rand(1, 3, 64, 64), {"task": "classify"})
    content = onnx.load(file)
    onnx.helper.set_model_props(content, {"stride": "32", "names": "{0: 'a', 1: 'b', 2: 'c', 3: 'd'}"})
    onnx.save(content, file)
    model, image = model_of(file), library_folders.photograph()
    pixels = torch.zeros((64, 64, 3), dtype=torch.uint8)
    model.preprocess(torch.from_numpy(image), pixels, *library_folders.SIZE)
    assert model.labels == ("a", "b", "c", "d")
    assert (pixels.numpy() == cv2.resize(image[:, 62:437], (64, 64), interpolation=cv2.INTER_LINEAR)).all()
    file.with_suffix(".json").write_text('{"task": "classify", "resize": "centre"}')
    assert isinstance(model_of(file).file.resize, Centre)


class Queries(nn.Module):
    """As RF-DETR: centres and sides in 0..1 of five queries, and logits of COCO's classes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nothing = x.mean((1, 2, 3)).reshape(-1, 1, 1) * 0
        return torch.full((1, 5, 4), 0.4) + nothing, torch.full((1, 5, 91), -5.0) + nothing


def test_rf_detrs_numbers_of_coco_have_gaps(tmp_path: Path) -> None:
    """Named as rfdetr 1.11.2 does (models.export); its labels alone are to be said."""
    names = {"input_names": ["input"], "output_names": ["dets", "labels"]}
    file = written(tmp_path / "best.onnx", Queries(), torch.rand(1, 3, 56, 56), {"labels": "coco"}, **names)
    labels = model_of(file).labels
    assert (labels[1], labels[17], labels[90], len(labels)) == ("person", "cat", "toothbrush", 91)


class Detr(nn.Module):
    """As RT-DETR's own repository exports it: a second input has the images' sizes, and the best pairs come out."""

    def forward(self, images: torch.Tensor, orig_target_sizes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nothing = images.mean((1, 2, 3)).reshape(-1, 1, 1) * 1e-7
        logits = torch.tensor([[[-5.0, -5, -5]] * 4 + [[1, -1, 2]]]) + nothing
        scores, index = torch.topk(logits.sigmoid().flatten(1), 5, dim=-1)
        labels = index - index // 3 * 3
        boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4]] * 4 + [[0.25, 0.75, 0.5, 0.5]]]) + nothing
        x, y, w, h = boxes.unbind(-1)
        corners = torch.stack([x - 0.5 * w, y - 0.5 * h, x + 0.5 * w, y + 0.5 * h], dim=-1)
        corners = corners * orig_target_sizes.repeat(1, 2).unsqueeze(1)
        return labels, corners.gather(1, (index // 3).unsqueeze(-1).repeat(1, 1, 4)), scores


@pytest.mark.parametrize("beside", [None, {"labels": ["a", "b", "c"]}, {"task": "tensors"}])
def test_rt_detr_of_its_own_repository_is_told_by_its_names(
    tmp_path: Path, beside: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    names = {"input_names": ["images", "orig_target_sizes"], "output_names": ["labels", "boxes", "scores"]}
    axes = {"dynamic_axes": {"images": {0: "N"}, "orig_target_sizes": {0: "N"}}}
    given = (IMAGE, torch.tensor([[64, 64]]))
    model = model_of(written(tmp_path / "best.onnx", Detr(), given, beside, **names, **axes))
    if beside == {"task": "tensors"}:
        assert [spec.name for spec in model.inputs] == ["images", "orig_target_sizes"]
        return
    assert (model.task, model.file.resize.how, model.export.batch[1] > 1) == ("detect", "stretch", True)
    assert "nothing states its normalisation, so pixels are 0 to 1" in caplog.text
    pixels = torch.zeros((2, 64, 64, 3), dtype=torch.uint8)
    found = answered(model, pixels, model.placement(200, 100), 1)["detections"]
    labels = ["c", "a", "b"] if beside else ["class 2", "class 0", "class 1"]
    assert [each["label"] for each in found] == labels
    assert [each["score"] for each in found] == [0.8808, 0.73106, 0.26894]
    assert [*found[0]["box"].values()] == pytest.approx([0, 50, 100, 100], abs=0.01)


@pytest.mark.parametrize(
    ("sidecar", "sentence"),
    [
        ({"task": "detect", "labels": ["a", "b", "c"], "layout": "yolov8"}, "2 classes, and there are 3 labels"),
        ({"task": "segment"}, r"outputs \[n, columns, anchors\] and \[n, m, h, w\], not \[1, 6, 84\]"),
        ({"task": "detect", "size": 96}, "64 x 64, and 96 x 96 is stated"),
    ],
)
def test_what_is_missing_is_named_with_the_shapes_seen(tmp_path: Path, sidecar: dict[str, Any], sentence: str) -> None:
    file = written(tmp_path / "best.onnx", Head(1, 6, ANCHORS), IMAGE, sidecar)
    with pytest.raises(WeightsError, match=sentence) as caught:
        model_of(file)
    assert str(caught.value).startswith("best.")
    assert "\n" not in str(caught.value)
