"""torchvision's own networks, exported, as semantic segmentation, embeddings and regression: their outputs in float32,
and their answers by the default engine and precision.
"""

from __future__ import annotations

import base64
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from app.cli import main
from app.precision.probes import probes, seen
from models import PixelModel, open_model, parse_spec
from models.sample import IMAGES

pytestmark = [pytest.mark.interop, pytest.mark.slow]

SIDE = 128


def sample_images() -> Tensor:
    """The sample images, float32 [n, 3, 128, 128], normalised."""
    pixels = [np.asarray(Image.open(path).convert("RGB").resize((SIDE, SIDE))) for path in sorted(IMAGES.glob("*.jpg"))]
    return normalised(np.stack(pixels))


def normalised(pixels: Any) -> Tensor:
    """Of pixels uint8 [n, h, w, 3]."""
    images = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(each).reshape(3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (images - mean) / std


class Segmenter(nn.Module):
    """LRASPP as torchvision builds it, untrained."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=6
        )

    def spread(self, images: Tensor) -> None:
        """Make its classes as likely as each other on these images, and as far apart as training makes them."""
        head = self.network.classifier
        logits = self(images)
        for layer in (head.low_classifier, head.high_classifier):
            layer.weight.data *= 4 / logits.std()
            layer.bias.data *= 4 / logits.std()
        head.high_classifier.bias.data -= self(images).mean((0, 2, 3))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.network(images)["out"]
        return found


def backbone(outputs: int = 0) -> nn.Module:
    network: nn.Module = torchvision.models.resnet18(weights=None)
    network.fc = nn.Linear(512, outputs) if outputs else nn.Identity()
    return network


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "segment_semantic": (Segmenter, ".onnx", {"labels": list("abcdef")}),
    "embed": (backbone, ".pt2", {"size": SIDE}),
    "regress": (lambda: backbone(2), ".pt2", {"size": SIDE, "labels": ["age", "height"]}),
}


@pytest.fixture(scope="module", params=NETWORKS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module, Path]:
    """A task, its network and the file."""
    task = request.param
    make, suffix, beside = NETWORKS[task]
    torch.manual_seed(3)
    network = make().train()
    file = tmp_path_factory.mktemp("files") / f"{task}{suffix}"
    example = torch.rand(2, 3, SIDE, SIDE)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        network(sample_images())  # Their statistics, so that layers keep their scale.
        network.eval()
        if isinstance(network, Segmenter):
            network.spread(sample_images())
        if suffix == ".onnx":
            torch.onnx.export(network, (example[:1],), str(file), dynamo=False)
        else:
            batch = {0: torch.export.Dim("n", min=1, max=64)}
            torch.export.save(torch.export.export(network, (example,), dynamic_shapes=(batch,)), str(file))
    file.with_suffix(".json").write_text(json.dumps({"task": task, **beside}))
    return task, network, file


def reference(network: nn.Module, pixels: Any) -> Any:
    """What torchvision's network says of pixels uint8 [n, h, w, 3]."""
    with torch.inference_mode():
        return network(normalised(pixels)).numpy()


def test_its_outputs_are_those_of_the_library(exported: tuple[str, nn.Module, Path]) -> None:
    task, network, file = exported
    model = open_model(parse_spec(str(file)), file.parent)
    assert isinstance(model, PixelModel)
    pixels = probes(model)
    wanted = reference(network, pixels)
    with torch.inference_mode():
        found = [each.numpy() for each in model.network()(torch.from_numpy(pixels))]
    if task == "segment_semantic":
        assert (found[0] == wanted.argmax(1)).mean() > 0.9999
        assert len(np.unique(found[0])) > 2, "several classes are there"
        return
    cosines = (found[0] * wanted).sum(1) / np.linalg.norm(found[0], axis=1) / np.linalg.norm(wanted, axis=1)
    assert cosines.min() > 0.9999


def test_its_answers_by_the_default_engine_and_precision_are_those_of_the_library(
    exported: tuple[str, nn.Module, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    task, network, file = exported
    image = IMAGES / "detect_1.jpg"
    assert main(["predict", str(file), str(image), "--json", "--device", "cpu", "--trust-exported", "true"]) == 0
    [answer] = json.loads(capsys.readouterr().out)["predictions"].values()
    model = open_model(parse_spec(str(file)), file.parent)
    assert isinstance(model, PixelModel)
    [wanted] = reference(network, seen(model, image.read_bytes())[0][None])
    if task == "segment_semantic":
        levels = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["class_map"]["png"]))))
        size = tuple(reversed(answer["class_map"]["size"]))
        right = np.asarray(Image.fromarray(wanted.argmax(0).astype(np.uint8)).resize(size, Image.Resampling.NEAREST))
        assert (levels == right).mean() > 0.95
        return
    found = answer["embedding"] if task == "embed" else [*answer["values"].values()]
    assert np.dot(found, wanted) / np.linalg.norm(found) / np.linalg.norm(wanted) > 0.999
