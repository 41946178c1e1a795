"""Exported networks as models: inputs that are not [n, 3, height, width] of floats, heads, torchvision's detectors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from app.precision.gate import Gate
from app.precision.probes import probes
from models import WeightsError, open_model, parse_spec
from tests.support.exports_of_networks import answered, opened, written
from tests.support.small_classifier import digest_of

onnx: Any = pytest.importorskip("onnx")
pytestmark = pytest.mark.filterwarnings("ignore")  # Exporters and PyTorch are not of one version's mind.

SIDE = 32
SIDECAR = {"task": "classify", "resize": "stretch", "scores": "logits"}
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8))
PLANES = PIXELS.permute(0, 3, 1, 2)
GREY = torch.stack([torch.from_numpy(np.array(Image.fromarray(each).convert("L")))[None] for each in PIXELS.numpy()])


class Network(nn.Module):
    """Of whatever channels, wherever they are; `scale`: what its numbers are divided by first."""

    def __init__(self, channels: int = 3, *, last: bool = False, scale: float = 0.0, batch: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer, self.head = nn.Conv2d(channels, 8, 5, 2), nn.Linear(8, 4)
        self.last, self.scale, self.batch = last, scale, batch

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() / self.scale if self.scale else x
        x = self.layer(x.permute(0, 3, 1, 2) if self.last else x).relu().amax((2, 3))
        logits: Tensor = self.head(x.reshape(self.batch, 8) if self.batch else x)
        return logits * 3


class Normalising(nn.Module):
    def __init__(self, network: nn.Module, scale: float, shift: float | Tensor, *, flips: bool = False) -> None:
        super().__init__()
        self.network, self.scale, self.shift, self.flips = network, scale, shift, flips

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.network((x.flip(1) if self.flips else x) * self.scale + self.shift)
        return found


def exported(folder: Path, network: nn.Module, example: Tensor, suffix: str, sidecar: dict[str, Any], axes: Any) -> Any:
    file = folder / f"m{suffix}"
    network = network.eval().requires_grad_(False)
    if suffix == ".onnx":
        written(file, network, example, input_names=["x"], dynamic_axes=axes)
    elif suffix == ".ts":
        torch.jit.save(torch.jit.trace(network, example), file)
    elif suffix == ".xml":
        openvino = pytest.importorskip("openvino")
        openvino.save_model(openvino.convert_model(network, example_input=example), file, compress_to_fp16=False)
    else:
        dynamic = ({0: torch.export.Dim("n", min=1, max=8)},)
        torch.export.save(torch.export.export(network, (example,), dynamic_shapes=dynamic), file)
    file.with_suffix(".json").write_text(json.dumps({**SIDECAR, **sidecar}))
    return open_model(parse_spec(f"m={file}@sha256:{digest_of(file)}"), folder)


def check(model: Any, right: Tensor) -> None:
    """Check the logits of PIXELS, alone and together; the gate's reference must be finite."""
    network = model.network()
    with torch.inference_mode():
        together = network(PIXELS)[0]
        alone = torch.cat([network(each[None])[0] for each in PIXELS])
    torch.testing.assert_close(together, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone, right, rtol=1e-4, atol=1e-4)
    assert np.isfinite(Gate(model, probes(model))._expected[0]).all()


OPEN = {"x": {0: "n"}}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_an_input_of_bytes_is_normalised_by_the_network_alone(tmp_path: Path, suffix: str, last: bool) -> None:
    network, given = Network(last=last, scale=255.0), PIXELS if last else PLANES.contiguous()
    sidecar = {"size": SIDE, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    model = exported(tmp_path, network, given[:2], suffix, sidecar, OPEN)
    check(model, network(given))
    if suffix == ".onnx":  # Its floats follow the precision that is asked for, as of every file.
        [half] = model.network().cast(torch.bfloat16)(PIXELS)
        torch.testing.assert_close(half, network(given), rtol=0.05, atol=0.3)


def test_metadata_on_pixels_and_scores_has_its_owner_state_them(tmp_path: Path) -> None:
    stated = {"mean": 0.5, "channels": "bgr", "resize": "letterbox", "pad": 0, "scores": "sigmoid"}
    facts = {"scale_values": "58", "reverse_input_channels": "NO", "resize_type": "fit_to_window", "multilabel": "True"}
    for suffix in (".onnx", ".xml"):
        exported(tmp_path, Network(), torch.rand(1, 3, SIDE, SIDE), suffix, {**stated, "size": SIDE}, OPEN)
        file = tmp_path / f"m{suffix}"
        if suffix == ".onnx":
            content = onnx.load(file)
            onnx.helper.set_model_props(content, {f"model_info {key}": text for key, text in facts.items()})
            onnx.save(content, file)
        else:
            lines = "".join(f'<{key} value="{text}"/>' for key, text in facts.items())
            file.write_text(
                f"<model_info>{lines}</model_info></rt_info>".join(file.read_text().rsplit("</rt_info>", 1))
            )
        assert opened(file).export.entry.bgr
        for key in stated if suffix == ".onnx" else ("mean",):
            (tmp_path / "m.json").write_text(json.dumps({"task": "classify", "size": SIDE, **stated, key: None}))
            with pytest.raises(WeightsError, match=rf'model_info .*which is not read: state "{key}"'):
                opened(file)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_input_of_whole_numbers_is_of_levels(tmp_path: Path, dtype: torch.dtype) -> None:
    network = Network(scale=255.0)
    check(exported(tmp_path, network, PLANES[:2].to(dtype), ".onnx", {}, OPEN), network(PLANES))


@pytest.mark.parametrize("suffix", [".onnx", ".ts"])
def test_channels_may_come_last(tmp_path: Path, suffix: str) -> None:
    network = Network(last=True)
    sidecar = {"mean": 0, "std": 1 / 255, "size": SIDE}
    model = exported(tmp_path, network, torch.rand(1, SIDE, SIDE, 3), suffix, sidecar, OPEN)
    assert model.input_shape == (SIDE, SIDE, 3)
    check(model, network(PIXELS.float()))
    with pytest.raises(WeightsError, match='state "channels", and "input": "levels" or "mean" and "std"'):
        exported(tmp_path, network, torch.rand(1, SIDE, SIDE, 3), suffix, {"size": SIDE}, OPEN)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("last", [False, True])
def test_one_channel_sees_grey(tmp_path: Path, suffix: str, last: bool) -> None:
    network, given = Network(1, last=last), GREY.permute(0, 2, 3, 1) if last else GREY
    model = exported(
        tmp_path, network, torch.rand_like(given.float()), suffix, {"size": SIDE, "mean": 0.5, "std": 0.25}, OPEN
    )
    check(model, network((given.float() / 255 - 0.5) / 0.25))


@pytest.mark.parametrize("batch", [2, 4])
def test_a_file_of_one_size_of_batch_answers_any_number_of_images(tmp_path: Path, batch: int) -> None:
    network = Network(batch=batch)
    model = exported(tmp_path, network, torch.rand(batch, 3, SIDE, SIDE), ".onnx", {"mean": 0, "std": 1}, None)
    assert model.batch_sizes((1, 2, 8)) == ((2,) if batch == 2 else (4,))
    network.batch = 0
    check(model, network(PLANES.float() / 255))


def test_images_that_share_a_scale_are_answered_alone(tmp_path: Path) -> None:
    class Relative(Network):
        def forward(self, x: Tensor) -> Tensor:
            """Divide by the brightest number of the batch, as the scale of dynamic quantisation."""
            return super().forward(x / x.amax())

    model = exported(tmp_path, Relative(), torch.rand(2, 3, SIDE, SIDE), ".onnx", {"mean": 0, "std": 1}, OPEN)
    assert model.export.batch == (1, 1)


@pytest.mark.parametrize(
    ("scale", "shift", "span", "kind"),
    [(1 / 58, -2.1, 255, "QUInt8"), (4.4, -2.1, 1, "QUInt8"), (1, -110, 255, "QInt8"), (4.4, -2.1, 1, "QUInt16")],
)
def test_a_quantised_network_may_normalise_by_itself(
    tmp_path: Path, scale: float, shift: float, span: int, kind: str
) -> None:
    quantization, runtime = pytest.importorskip("onnxruntime.quantization"), pytest.importorskip("onnxruntime")
    quantised, values = tmp_path / "q.onnx", np.linspace(0, span, 3 * SIDE * SIDE, dtype=np.float32)

    class Values(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        given = iter([{"x": values.reshape(1, 3, SIDE, SIDE)}])

        def get_next(self) -> Any:
            return next(self.given, None)

    network = Normalising(Network(), scale, shift).eval().requires_grad_(False)
    written(tmp_path / "f.onnx", network, torch.rand(2, 3, SIDE, SIDE), input_names=["x"], dynamic_axes=OPEN)
    kinds = {"activation_type": quantization.QuantType[kind], "weight_type": quantization.QuantType.QInt8}
    quantization.quantize_static(tmp_path / "f.onnx", quantised, Values(), **kinds)
    quantised.with_suffix(".json").write_text(json.dumps(SIDECAR))
    pixels = (PLANES / 255 * span).numpy()
    exactly = runtime.SessionOptions()  # Fused kernels round near ties as the processor does.
    exactly.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    [right] = runtime.InferenceSession(quantised, exactly, ["CPUExecutionProvider"]).run(None, {"x": pixels})
    model = open_model(parse_spec(f"m={quantised}@sha256:{digest_of(quantised)}"), tmp_path)
    check(model, torch.from_numpy(right))


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_an_input_of_signed_bytes_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(Exception, match="its input is of int8, whose zero it does not say"):
        exported(tmp_path, Network(scale=255.0), PLANES[:2].to(torch.int8), suffix, {"size": SIDE}, OPEN)


@pytest.mark.parametrize(
    ("suffix", "flips", "least", "most", "refused"),
    [(".onnx", True, 0.1, 0.1, True), (".xml", True, 0.1, 0.1, True), (".ts", False, 0.406, 0.485, True),
     (".onnx", True, 0.406, 0.485, False)],
)  # fmt: skip
def test_a_network_whose_input_may_have_blue_first_has_its_owner_say_so(
    tmp_path: Path, suffix: str, flips: bool, least: float, most: float, refused: bool
) -> None:
    """Keras' applications of Caffe's networks exchange channels, and subtract means that say that red was first."""
    network = Normalising(Network(), 5.0, -5 * torch.linspace(least, most, 3).view(3, 1, 1), flips=flips)
    example, sidecar = torch.rand(2, 3, SIDE, SIDE), {"size": SIDE, "input": "floats", "mean": 0, "std": 1}
    if refused:
        with pytest.raises(Exception, match='state "channels": "bgr" where its input has blue first'):
            exported(tmp_path, network, example, suffix, sidecar, OPEN)
        sidecar["channels"] = "bgr"
    given = PLANES.flip(1) if refused else PLANES
    check(exported(tmp_path, network, example, suffix, sidecar, OPEN), network(given / 255))


@pytest.mark.parametrize(
    ("suffix", "scale", "shift", "span"),
    [
        (".onnx", 1 / 255, 0, 255),
        (".onnx", 1 / 0.226, -0.456 / 0.226, 1),
        (".onnx", 1, 0, 0),
        (".onnx", 1, -0.5, 1),
        (".onnx", 2, 0, 1),
        (".pt2", 1 / 127.5, -1, 255),
        (".ts", 1 / 255, 0, 255),
        (".xml", 1, -117.5, 255),
    ],
)
def test_a_network_that_normalises_by_itself_gets_the_pixels_that_it_wants(
    tmp_path: Path, suffix: str, scale: float, shift: float, span: int
) -> None:
    """Its owner states no mean: then those of ImageNet are only for networks that do nothing to their input."""
    network = Normalising(Network(), scale, shift)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    given = PLANES / 255 * span if span else (PLANES / 255 - mean) / std
    check(exported(tmp_path, network, torch.rand(2, 3, SIDE, SIDE), suffix, {"size": SIDE}, OPEN), network(given))


def test_a_division_that_openvino_has_put_into_the_weights_is_to_be_stated(tmp_path: Path) -> None:
    network, example, sized = Normalising(Network(), 1 / 255, 0), torch.rand(2, 3, SIDE, SIDE), {"size": SIDE}
    with pytest.raises(Exception, match='state "input": "levels" beside it where its input is 0 to 255'):
        exported(tmp_path, network, example, ".xml", sized, OPEN)
    check(exported(tmp_path, network, example, ".xml", {**sized, "input": "levels"}, OPEN), network(PLANES))


def test_a_second_normalisation_is_refused_unless_its_owner_insists(tmp_path: Path) -> None:
    network, example = Normalising(Network(), 1 / 255, 0), torch.rand(2, 3, SIDE, SIDE)
    with pytest.raises(Exception, match='state no "mean" and "std", or "input": "floats"'):
        exported(tmp_path, network, example, ".onnx", {"mean": 0.5, "std": 0.5}, OPEN)
    right = network(PLANES / 127.5 - 1)
    check(exported(tmp_path, network, example, ".onnx", {"mean": 0.5, "std": 0.5, "input": "floats"}, OPEN), right)


EVEN = torch.full((1, SIDE, SIDE, 3), 90, dtype=torch.uint8)
PLAIN = {"task": "classify", "resize": "stretch", "mean": [0, 0, 0], "std": [1, 1, 1]}
HEADS: dict[str, tuple[list[float], Any]] = {
    "softmax": ([4.0, 0.0, -1.0], nn.Softmax(1)),
    "sigmoid": ([4.0, 3.0, -1.0], nn.Sigmoid()),
    "logits": ([4.0, 0.0, -1.0], None),
    "small logits": ([0.3, 0.7, 0.2], None),
    "one logit": ([-1.5], None),
    "one small logit": ([0.4], None),
    "one probability": ([-1.5], nn.Sigmoid()),
}


def network(bias: list[float], end: nn.Module | None) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(3, len(bias))
    head.bias.data = torch.tensor(bias)
    head.weight.data *= 0.1  # The small logits of no picture are outside 0 to 1.
    layers = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Sigmoid(), head, *([] if end is None else [end])]
    return nn.Sequential(*layers).eval().requires_grad_(False)


def classifier_of(folder: Path, layers: nn.Module, sidecar: dict[str, Any]) -> Any:
    axes = {"dynamic_axes": {"x": {0: "n"}}, "input_names": ["x"]}
    return opened(written(folder / "m.onnx", layers, torch.rand(1, 3, SIDE, SIDE), sidecar, **axes))


def scores_of(model: Any) -> list[float]:
    found = {each["class_id"]: each["score"] for each in answered(model, EVEN)["classes"]}
    return [found[number] for number in range(len(found))]


@pytest.mark.parametrize("head", HEADS)
def test_a_head_is_told_by_what_it_answers(tmp_path: Path, head: str, caplog: pytest.LogCaptureFixture) -> None:
    bias, end = HEADS[head]
    layers = network(bias, end)
    with caplog.at_level(logging.WARNING):
        model = classifier_of(tmp_path, layers, PLAIN)
    said: Tensor = layers(EVEN.permute(0, 3, 1, 2).float() / 255)
    if end is None:
        said = said.softmax(1) if len(bias) > 1 else said.sigmoid()
    assert scores_of(model) == pytest.approx(said[0].tolist(), abs=1e-4)
    assert model.adapter.scored_by == ("softmax" if head in ("softmax", "logits", "small logits") else "sigmoid")
    assert ("as it is" in caplog.text or "as they are" in caplog.text) == (end is not None)
    if head == "one probability":  # Of two labels it is the second one's.
        two = classifier_of(tmp_path, layers, {**PLAIN, "labels": ["good", "defect"]})
        assert scores_of(two) == pytest.approx([1 - float(said), float(said)], abs=1e-4)


class Ended(nn.Module):
    def __init__(self, end: Any) -> None:
        super().__init__()
        self.layers, self.end = network([4.0, 0.0, -1.0], None), end

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.end(self.layers(x))
        return answer


@pytest.mark.parametrize(
    ("end", "said", "batch"),
    [
        (lambda scores: scores.argmax(1), r"the number of a class \(ArgMax\): export the network with its scores", 1),
        (lambda scores: scores.round().int(), "whole numbers without one sum", 1),
        (lambda scores: 100 * scores.sigmoid(), "as a sigmoid's times 100: divide them by 100", 1),
        (lambda scores: scores / scores.norm(dim=0, keepdim=True), "depends on the others of its batch of 4", 4),
    ],
)
def test_what_is_no_score_of_one_image_is_refused(tmp_path: Path, end: Any, said: str, batch: int) -> None:
    with pytest.raises(Exception, match=said):
        opened(written(tmp_path / "m.onnx", Ended(end), torch.rand(batch, 3, SIDE, SIDE), PLAIN))


class ClassMap(nn.Module):
    """Of each pixel the channel that is most: [n, 1, h, w] of int64, as mmsegmentation and PaddleSeg export theirs; or
    the channels themselves, last, as TensorFlow has them.
    """

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv2d(3, 4, 1), last

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found.permute(0, 2, 3, 1) if self.last else found.argmax(1, keepdim=True)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("labels", [None, ["road", "car", "sky", "tree"]])
def test_a_map_has_classes_as_numbers_or_as_its_last_axis(tmp_path: Path, labels: list[str] | None, last: bool) -> None:
    layers = ClassMap(last).eval().requires_grad_(False)
    layers.layer.weight.data = torch.tensor([[9.0, 0, 0], [0, 9, 0], [0, 0, 9], [-9, -9, -9]]).reshape(4, 3, 1, 1)
    assert layers.layer.bias is not None
    layers.layer.bias.data = torch.tensor([0.0, 0.0, 0.0, 3.0])
    sidecar = {"task": "segment_semantic", "mean": 0, "std": 1, **({"labels": labels} if labels else {})}
    pixels = torch.zeros((1, SIDE, SIDE, 3), dtype=torch.uint8)
    for number in range(3):
        pixels[0, 8 * number : 8 * number + 8, :, number] = 200
    answer = answered(classifier_of(tmp_path, layers, sidecar), pixels)
    assert [each["class_id"] for each in answer["areas"]] == [0, 1, 2, 3]
    assert [each["share"] for each in answer["areas"]] == [0.25] * 4
    assert [each["label"] for each in answer["areas"]] == labels or [f"class {n}" for n in range(4)]


@pytest.mark.parametrize("stated", [{}, {"resize_to": 36}, {"crop": 0.9}, {"resize": "stretch"}])
def test_a_resize_that_nothing_states_and_a_map_of_the_centre_alone_are_said(
    tmp_path: Path, stated: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    beside = {"mean": 0, "std": 1, "labels": ["other", "red"], **stated}
    with caplog.at_level(logging.WARNING):
        classifier_of(tmp_path, network([0.0, 1.0], None), {"task": "classify", **beside})
        maps = {"resize": "centre", **beside, "task": "segment_semantic"}
        classifier_of(tmp_path, nn.Conv2d(3, 2, 1).eval().requires_grad_(False), maps)
    assert ("nothing states its resize" in caplog.text) == (not stated)
    assert ("the centre that is cut out" in caplog.text) == ("resize" not in stated)


def test_a_map_of_one_probability_is_read_as_it_is(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid()).eval().requires_grad_(False)
    model = classifier_of(tmp_path, layers, {"task": "segment_semantic", "mean": 0, "std": 1})
    assert model.adapter.file.option("scores") == "probabilities"


def test_a_product_without_weights_may_be_of_probabilities(tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """float [n, 3, h, w] -> float [n, 3]: shares of places, times the probabilities at each."""
            places = x.flatten(2)
            found: Tensor = places.mean(1, keepdim=True).softmax(2) @ (4 * places - 2).sigmoid().transpose(1, 2)
            return found.squeeze(1)

    found = scores_of(classifier_of(tmp_path, Pooled(), PLAIN))
    assert found == pytest.approx(Pooled()(EVEN.permute(0, 3, 1, 2).float() / 255)[0].tolist(), abs=1e-4)


class Found(nn.Module):
    """As torchvision's detectors: an image without a batch in, as many boxes, scores and labels out as it finds."""

    most = 1.0

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pixels = 4 * image[:, :, :, None].permute(3, 0, 1, 2) / self.most - 2  # Fails for an image with a batch's axis.
        places = (functional.conv2d(pixels, torch.eye(3)[:1, :, None, None])[0, 0] > 0).nonzero()
        boxes = torch.cat((places.flip(1), places.flip(1) + 1), dim=1).float()
        return boxes, boxes[:, 0] / 64, places[:, 1] % 2 + 1


@pytest.mark.parametrize(
    ("beside", "labels"),
    [
        (None, ["class 2", "class 1"]),
        ({"task": "detect", "labels": ["cat", "dog"]}, ["dog", "cat"]),
        ({"task": "detect", "labels": ["__background__", "cat", "dog"]}, ["dog", "cat"]),
        ({"task": "detect", "labels": "coco"}, ["bicycle", "person"]),
        ({"labels": {0: "cat", 1: "dog"}}, ["dog", "cat"]),
    ],
)
def test_its_labels_begin_with_1(tmp_path: Path, beside: dict[str, Any] | None, labels: list[str]) -> None:
    model: Any = opened(written(tmp_path / "best.onnx", Found(), torch.rand(3, 48, 64), beside))
    assert (model.task, model.export.how.layout, model.file.size, model.input_shape) == (
        "detect", "torchvision", (48, 64), (48, 64, 3)
    )  # fmt: skip
    if beside is not None and beside["labels"] == "coco":
        assert (model.labels[13], model.labels[90], len(model.labels)) == ("stop sign", "toothbrush", 91)
    pixels = torch.zeros((2, 48, 64, 3), dtype=torch.uint8)
    pixels[1, 30, 40] = pixels[1, 10, 61] = 255
    none, two = (answered(model, pixels, model.placement(128, 96), row)["detections"] for row in (0, 1))
    assert none == []
    assert [each["label"] for each in two] == labels
    assert [[*each["box"].values()] for each in two] == [[122, 20, 124, 22], [80, 60, 82, 62]]


class OfLevels(Found):
    """As Detectron2's, whose levels have blue first, and whose classes begin with 0."""

    most = 255.0


def test_a_detector_that_takes_levels_is_not_torchvisions(tmp_path: Path) -> None:
    file = written(tmp_path / "best.onnx", OfLevels(), torch.rand(3, 48, 64), {"task": "detect"})
    with pytest.raises(WeightsError, match=r'has no axis of a batch: state "channels"'):
        opened(file)
