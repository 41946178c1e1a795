"""Classifiers: the pixels and the logits of torchvision, for every kind, and the pixels of Ultralytics' transforms."""

from __future__ import annotations

import importlib.util
import io
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models as torchvision_models
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as transforms

from app.protocols import open_inference
from app.protocols.wire import RequestedOutput
from models.classifiers import ARCHITECTURES, Classifier, _fuse, _skeleton, default_labels, fitted
from models.contract.errors import UnknownModelError, WeightsError
from models.contract.model import Options, Placement
from models.contract.resize import Centre, Resize
from models.exports.answers import Export, TriedImages
from models.exports.exported import _image_model
from models.exports.images import ExportedImages
from models.exports.layouts import Interpretation
from models.weights.checkpoint import Checkpoint
from models.yolo.model import YOLO
from tests.support.photographs import PHOTOGRAPHS

LABELS = tuple("abcdefg")


def classifier(architecture: str, weights: str = "random", file: Path | None = None) -> Classifier:
    return Classifier.of("test", architecture, LABELS, weights, str(file) if file else None)


def torchvision_network(architecture: str) -> nn.Module:
    """Build torchvision's network, with BatchNorm as after training and a head that tells classes apart."""
    auxiliary = {"transform_input": True, "aux_logits": True, "init_weights": False}
    torch.manual_seed(7)
    network: nn.Module = torchvision_models.get_model(
        architecture,
        weights=None,
        num_classes=len(LABELS),
        **(auxiliary if architecture in ("googlenet", "inception_v3") else {}),
    )
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.1)
            if isinstance(module, nn.Linear) and module.out_features == len(LABELS):
                module.weight.normal_(0, 0.05)
    return network.eval()


def saved(network: nn.Module, directory: Path) -> Path:
    """Write the weights; those of a DenseNet with the names of the published files, which have no counters."""
    path, state = directory / "weights.safetensors", network.state_dict()
    if isinstance(network, torchvision_models.DenseNet):
        state = {re.sub(r"(norm|conv)([12])\.", r"\1.\2.", name): each for name, each in state.items() if each.ndim}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


def preprocessed(model: Classifier, image: np.ndarray[Any, Any], size: tuple[int, int] | None = None) -> Tensor:
    out = torch.full(model.input_shape, 77, dtype=torch.uint8)
    height, width = size or image.shape[:2]
    model.preprocess(torch.from_numpy(image), out, width, height)
    return out


pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("sklearn", "ultralytics")),
    reason="the photographs come with scikit-learn and ultralytics",
)


def centre(model: Classifier) -> Centre:
    assert isinstance(model.file.resize, Centre)
    return model.file.resize


def reference(model: Classifier, image: Image.Image | Tensor) -> Tensor:
    """torchvision's own transforms before normalisation, uint8 [h, w, 3]."""
    declared = torchvision_models.get_model_weights(model.architecture).DEFAULT.transforms()
    resized = transforms.resize(
        image, declared.resize_size, interpolation=declared.interpolation, antialias=declared.antialias
    )
    cropped = transforms.center_crop(resized, declared.crop_size)
    return (cropped if isinstance(cropped, Tensor) else transforms.pil_to_tensor(cropped)).permute(1, 2, 0)


# Preprocessing


@pytest.mark.parametrize(
    ("width", "height"),
    [(1, 1), (2, 1), (3, 7), (224, 224), (232, 232), (231, 233), (500, 375), (375, 501), (640, 90), (90, 640)],
)
@pytest.mark.parametrize("architecture", ["resnet50", "efficientnet_b0"])
def test_pixels_equal_torchvisions_at_any_size(architecture: str, width: int, height: int) -> None:
    image = np.array(Image.fromarray(PHOTOGRAPHS["china"]()).resize((width, height)))
    model = classifier(architecture)
    allowed = 2 if centre(model).interpolation == "bicubic" else 1
    expected = reference(model, Image.fromarray(image)).int()
    torch.testing.assert_close(preprocessed(model, image).int(), expected, rtol=0, atol=allowed)


def class_count(architecture: str, state: dict[str, Tensor]) -> int:
    return fitted(architecture, Checkpoint(state)).class_count


# The network


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_can_be_asked_for_its_classes(architecture: str) -> None:
    model = Classifier.of("test", architecture, default_labels(architecture), "official", None)
    declared = torchvision_models.get_model_weights(architecture).DEFAULT.transforms()
    assert len(model.labels) == 1000
    assert model.input_shape == (declared.crop_size[0], declared.crop_size[0], 3)
    assert centre(model).shorter >= declared.crop_size[0]
    assert centre(model).interpolation in ("bilinear", "bicubic")
    assert declared.interpolation in (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)
    assert (model.mean, model.std) == (tuple(declared.mean), tuple(declared.std))
    assert class_count(architecture, _skeleton(architecture, 5, auxiliary=False).state_dict()) == 5


def test_files_of_another_network_are_refused_with_the_reason() -> None:
    state = torchvision_network("resnet18").state_dict()
    with pytest.raises(UnknownModelError):
        class_count("resnet51", state)
    cases: list[tuple[str, dict[str, Tensor], str]] = [
        ("resnet34", state, r"not of resnet34: layer1\.2\.bn1\.bias is missing"),
        ("resnet18", {**state, "extra": torch.zeros(1)}, "it has no extra"),
        ("resnet18", {**state, "conv1.weight": torch.zeros(1)}, r"conv1\.weight is \[1\], not \[64, 3, 7, 7\]"),
        ("resnet50", {"model.22.cv3.0.2.bias": torch.zeros(80)}, "YOLOv8"),
        ("resnet18", {**state, "fc.weight": torch.zeros(0, 512)}, "not of resnet18"),
    ]
    for architecture, weights, message in cases:
        with pytest.raises(WeightsError, match=message):
            class_count(architecture, weights)


# Answers


def test_the_answer_lists_the_best_classes_in_order() -> None:
    model = classifier("resnet18")
    logits = np.log(np.array([[0.05, 0.4, 0.05, 0.1, 0.3, 0.05, 0.05]], np.float32)) + 5
    reduced = model.reduce((logits,), 0, Options())
    assert not np.shares_memory(reduced[0], logits)
    answer = model.postprocess(reduced, Placement(640, 480), Options(top_k=4))
    assert answer == {
        "classes": [
            {"label": "b", "class_id": 1, "score": pytest.approx(0.4)},
            {"label": "e", "class_id": 4, "score": pytest.approx(0.3)},
            {"label": "d", "class_id": 3, "score": pytest.approx(0.1)},
            {"label": "a", "class_id": 0, "score": pytest.approx(0.05)},
        ],
        "width": 640,
        "height": 480,
    }
    assert {type(value) for value in answer["classes"][0].values()} == {str, int, float}


@pytest.mark.parametrize("top_k", [-1, 0, 1, 5, 6, 7, 9])
def test_the_answers_of_several_images_are_those_of_each(top_k: int) -> None:
    """Also where classes are equal, in some images or in all."""
    model = classifier("resnet18")
    random = np.random.default_rng(0)
    for spread in (2, 3, 1000):
        outputs = [(random.integers(0, spread, 7).astype(np.float32),) for _ in range(40)]
        placements = [Placement(number, 7) for number in range(40)]
        expected = [model.postprocess(*each, Options(top_k=top_k)) for each in zip(outputs, placements, strict=True)]
        assert model.postprocess_all(outputs, placements, Options(top_k=top_k)) == expected
    assert model.postprocess_all([], [], Options(top_k=top_k)) == []


@pytest.mark.parametrize("most", [-1, 0, 1, 5, 7, 9, 30])
def test_what_a_batch_is_reduced_to_answers_as_each_image_does(most: int) -> None:
    """Whatever is asked for beside it, and in a batch that was padded. Logits are sent where they are asked for."""
    model = classifier("resnet18")
    random = np.random.default_rng(0)
    for spread in (2, 3, 1000):
        logits = random.integers(0, spread, (8, 7)).astype(np.float32)
        options = [Options(top_k=top_k, tensors=top_k != 3) for top_k in (most, 1, 3, 5, 2)]
        reduced = model.reduce_all((logits,), options)
        assert len(reduced) == len(options)
        [(_, *best)] = model.reduce_all((logits,), options[:1])
        assert [each.tolist() for each in best] == [each.tolist() for each in reduced[0][1:]]
        for index, (asked, sent) in enumerate(zip(options, reduced, strict=True)):
            alone = model.reduce((logits,), index, asked)
            assert len(sent) == (2 if asked.tensors and most > 0 else 1)
            if asked.tensors or most <= 0:
                np.testing.assert_array_equal(sent[0], alone[0])
                np.testing.assert_array_equal(model.tensors(sent, Placement(640, 480), asked)["logits"], alone[0])
            assert not np.shares_memory(sent[0], logits)
            answers = [model.postprocess(each, Placement(640, 480), asked) for each in (sent, alone)]
            assert answers[0] == answers[1]
            assert {type(entry["class_id"]) for entry in answers[0]["classes"]} <= {int}


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width * 10_007 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1200), st.integers(1, 1200), st.integers(32, 320))
def test_every_byte_is_that_of_ultralytics_transforms(width: int, height: int, side: int) -> None:
    assume(max(width, height) <= 64 * min(width, height))  # Other strips are cut before they are resized.
    image, resize = noise(width, height), Centre((side, side), side, by="pillow")
    out = torch.zeros((side, side, 3), dtype=torch.uint8)
    resize.preprocess(torch.from_numpy(image), out, width, height)
    expected = transforms.center_crop(transforms.resize(Image.fromarray(image), [side]), [side, side])
    assert np.array_equal(out.numpy(), np.array(expected))


def of_export(size: tuple[int, int]) -> Resize:
    how, shades = Interpretation("classes", "classes", 3, probabilities=True), ((0.0,) * 3, (1.0,) * 3)
    tried = TriedImages(
        "classify", Export(how, (1, 1)), size, "centre", *shades, None, "ultralytics 8.4.1", ("a", "b", "c"), ((1, 3),)
    )
    model = _image_model("m", Path("m.onnx"), tried, None)
    assert isinstance(model, ExportedImages)
    return model.file.resize


@pytest.mark.parametrize("shape", [(96, 128), (128, 96)], ids=["wide", "tall"])
@pytest.mark.parametrize("size", [(333, 421), (640, 480), (96, 128), (421, 97)])
def test_to_an_input_that_is_no_square_ultralytics_stretches(shape: tuple[int, int], size: tuple[int, int]) -> None:
    checkpoint = YOLO.of("m", "yolov8n-cls", ("a", "b", "c"), "random", None, size=shape).file.resize
    image, expected = noise(*size), transforms.resize(Image.fromarray(noise(*size)), list(shape))
    for resize in (checkpoint, of_export(shape)):
        out = torch.zeros((*shape, 3), dtype=torch.uint8)
        resize.preprocess(torch.from_numpy(image), out, *size)
        assert np.array_equal(out.numpy(), np.array(expected))


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


@pytest.mark.parametrize(
    ("architecture", "unfused"),
    [
        ("resnet18", 0),
        ("efficientnet_b0", 0),
        ("googlenet", 0),
        ("densenet121", 62),  # its BatchNorm comes before the convolution
        ("mnasnet0_5", 0),
        ("shufflenet_v2_x0_5", 0),
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


@pytest.mark.parametrize("architecture", ["regnet_y_16gf", "vit_b_16", "efficientnet_b1", "resnet50"])
def test_published_weights_have_their_own_preprocessing(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for published in torchvision_models.get_model_weights(architecture):
        file = Path("somewhere") / published.url.rpartition("/")[2]
        declared, resize = published.transforms(), classifier(architecture, file.name, file).file.resize
        assert isinstance(resize, Centre)
        assert (resize.size, resize.shorter, resize.interpolation) == (
            (declared.crop_size[0],) * 2, declared.resize_size[0], declared.interpolation.value
        )  # fmt: skip
        assert caplog.messages[-1].endswith(f"preprocessing as of torchvision's {published}")


def test_a_network_is_traced_while_another_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    core, other, found = torchvision_network("resnet18"), nn.Linear(2, 1), []

    def forward(self: Any, x: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(other, torch.ones(1, 2)).result())
        return self.bn1(self.conv1(x))

    monkeypatch.setattr(type(core), "forward", forward)
    _fuse(core)
    assert isinstance(core.bn1, nn.Identity)
    assert torch.equal(found[0], other(torch.ones(1, 2)))


def test_a_classification_has_the_labels_of_the_model_that_computed_the_row() -> None:
    """After a load, rows of one request may be of the model before and of the one after."""
    before = YOLO.of("m", "yolov8n-cls", ("a", "b", "c"), "random", None, size=(96, 96))
    finish, output = open_inference.finisher({"probabilities"}), RequestedOutput("probabilities", classification=1)
    options = Options(tensors=True)
    [reduced] = before.adapter.reduce_all([np.array([[3.0, 1.0, 2.0]], np.float32)], [options])
    both = before, replace(before, labels=("c", "b", "a"))
    made, labels = zip(*(finish(each, reduced, Placement(96, 96), options) for each in both), strict=True)
    rows = {output.name: [each[output.name] for each in made]}
    [found] = open_inference.results([output], rows, labels)
    assert [bytes(text)[-4:] for text in found.data] == [b":0:a", b":0:c"]
