"""models.classifiers: the same pixels and the same logits as torchvision, for every kind of classifier."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torchvision import models as torchvision_models
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as transforms

from models import open_model, parse_spec
from models.classifiers import ARCHITECTURES, Classifier, _skeleton, default_labels, fitted
from models.contract.errors import UnknownModelError, WeightsError
from models.contract.model import Options, Placement
from models.contract.resize import Centre
from models.weights.checkpoint import Checkpoint, read_header
from tests.support.classifiers import classifier, preprocessed, saved, torchvision_network
from tests.support.photographs import PHOTOGRAPHS

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("sklearn", "ultralytics")),
    reason="the photographs come with scikit-learn and ultralytics",
)


def centre(model: Classifier) -> Centre:
    assert isinstance(model.file.resize, Centre)
    return model.file.resize


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def reference(model: Classifier, image: Image.Image | Tensor) -> Tensor:
    """torchvision's own transforms before normalisation, uint8 [h, w, 3]."""
    declared = torchvision_models.get_model_weights(model.architecture).DEFAULT.transforms()
    resized = transforms.resize(
        image, declared.resize_size, interpolation=declared.interpolation, antialias=declared.antialias
    )
    cropped = transforms.center_crop(resized, declared.crop_size)
    return (cropped if isinstance(cropped, Tensor) else transforms.pil_to_tensor(cropped)).permute(1, 2, 0)


def largest_difference(one: Tensor, other: Tensor) -> int:
    assert one.shape == other.shape
    return int((one.int() - other.int()).abs().max())


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
    assert largest_difference(preprocessed(model, image), reference(model, Image.fromarray(image))) <= allowed


def test_a_strip_costs_no_more_memory_than_a_photograph() -> None:
    image = np.tile(np.arange(200_000, dtype=np.uint32)[None, :, None] // 500 % 256, (1, 1, 3)).astype(np.uint8)
    found = preprocessed(classifier("resnet50"), image)  # resized whole it would have 46 million columns
    assert largest_difference(found, torch.from_numpy(image[:1, 100_000:100_001]).expand_as(found)) <= 1


# Decoding at reduced scale


def test_a_reduced_strip_lands_where_the_whole_one_does() -> None:
    wide = Image.fromarray(PHOTOGRAPHS["china"]()).resize((9001, 1001), Image.Resampling.LANCZOS)
    encoded = io.BytesIO()
    wide.save(encoded, "JPEG", quality=95)
    reduced = Image.open(encoded)
    reduced.draft("RGB", (4500, 500))
    model = classifier("resnet50")
    file = replace(model.file, resize=replace(centre(model), size=(96, 96), shorter=100))
    model = replace(model, file=file, input_shape=(96, 96, 3))
    assert reduced.size == (4501, 501)
    found = preprocessed(model, np.array(reduced), (1001, 9001))
    assert largest_difference(found, preprocessed(model, np.array(Image.open(encoded)))) <= 3


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


def test_a_vision_transformer_is_made_for_the_images_of_its_weights() -> None:
    """vit_h_14's are of 518 x 518: 37 x 37 parts, and the class."""
    assert open_model(parse_spec("vit_h_14:random"), Path()).input_shape == (518, 518, 3)
    for architecture, parts in (("vit_h_14", 37 * 37), ("vit_b_16", 14 * 14)):
        positions = _skeleton(architecture, 5, auxiliary=False).state_dict()["encoder.pos_embedding"]
        assert positions.shape[1] == parts + 1


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_fine_tuned_file_in_half_precision_tells_its_class_count(tmp_path: Path, suffix: str) -> None:
    theirs = torchvision_network("resnet18").half()
    path = tmp_path / f"dogs.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(theirs.state_dict(), path)
    assert class_count("resnet18", read_header(path).state) == 7
    network = classifier("resnet18", path.name, path).network()
    assert {tensor.dtype for tensor in network.state_dict().values()} <= {torch.float32, torch.int64}
    assert network(torch.zeros(2, *network.input_shape, dtype=torch.uint8))[0].shape == (2, 7)


def test_old_densenet_names_and_missing_counters_are_accepted(tmp_path: Path) -> None:
    theirs = torchvision_network("densenet121")
    old = {
        name.replace("norm1", "norm.1")
        .replace("conv1", "conv.1")
        .replace("norm2", "norm.2")
        .replace("conv2", "conv.2"): v
        for name, v in theirs.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    path = tmp_path / "densenet121.pth"
    torch.save(old, path)
    model = classifier("densenet121", path.name, path)
    pixels = preprocessed(model, PHOTOGRAPHS["flower"]())
    with torch.inference_mode():
        expected = theirs(transforms.normalize(pixels.permute(2, 0, 1) / 255, model.mean, model.std)[None])
        torch.testing.assert_close(model.network()(pixels[None])[0], expected, rtol=1e-4, atol=1e-4)


def test_files_of_another_network_are_refused_with_the_reason() -> None:
    state = torchvision_network("resnet18").state_dict()
    with pytest.raises(UnknownModelError):
        class_count("resnet51", state)
    with pytest.raises(WeightsError, match=r"not of resnet34: layer1\.2\.bn1\.bias is missing"):
        class_count("resnet34", state)
    with pytest.raises(WeightsError, match="not of vit_b_16"):
        class_count("vit_b_16", state)
    with pytest.raises(WeightsError, match=r"it has no extra"):
        class_count("resnet18", {**state, "extra": torch.zeros(1)})
    with pytest.raises(WeightsError, match=r"conv1\.weight is \[1\], not \[64, 3, 7, 7\]"):
        class_count("resnet18", {**state, "conv1.weight": torch.zeros(1)})
    with pytest.raises(WeightsError, match="YOLOv8"):
        class_count("resnet50", {"model.22.cv3.0.2.bias": torch.zeros(80)})
    for head in (torch.tensor(1.0), torch.zeros(0, 512)):
        with pytest.raises(WeightsError):
            class_count("resnet18", {**state, "fc.weight": head})


def test_a_file_that_changed_its_class_count_is_refused(tmp_path: Path) -> None:
    path = saved(torchvision_network("resnet18", classes=6), tmp_path)
    with pytest.raises(WeightsError, match="6 classes, but there are 7 labels"):
        classifier("resnet18", path.name, path).network()


def test_random_weights_are_the_same_every_time_and_leave_the_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, other = (classifier("resnet18").network().state_dict() for _ in range(2))
    assert torch.rand(1) == expected
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("architecture", ["resnet18", "googlenet", "mnasnet0_5", "swin_t"])
def test_for_a_device_that_computes_nothing_a_network_of_the_right_shapes_is_made_unmeasured(architecture: str) -> None:
    model = replace(classifier(architecture), weights="random", weights_file=None)
    pixels = torch.zeros((2, *model.input_shape), dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(Classifier, "_random_core", None)
        (logits,) = model.network_of_shapes()(pixels)
    assert logits.shape == (2, len(model.labels))
    assert logits.dtype == torch.float32


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


@pytest.mark.parametrize(("top_k", "expected"), [(0, 0), (-3, 0), (1, 1), (7, 7), (1000, 7)])
def test_top_k_is_clipped_to_the_class_count(top_k: int, expected: int) -> None:
    model = classifier("resnet18")
    answer = model.postprocess((np.zeros(7, np.float32),), Placement(1, 1), Options(top_k=top_k))
    assert [entry["class_id"] for entry in answer["classes"]] == list(range(expected))


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


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_equal_scores_are_in_the_order_of_their_classes(top_k: int) -> None:
    """As if all of them were sorted, which they are not."""
    model = classifier("resnet18")
    for seed in range(50):
        logits = np.random.default_rng(seed).integers(0, 3, 7).astype(np.float32)
        expected = sorted(range(7), key=lambda number: (-logits[number], number))[:top_k]
        answer = model.postprocess((logits,), Placement(1, 1), Options(top_k=top_k))
        assert [entry["class_id"] for entry in answer["classes"]] == expected
