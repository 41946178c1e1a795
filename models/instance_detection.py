"""Our own YOLOv8 for masks, poses, turned boxes and classes: `yolov8n-seg`, `-pose`, `-obb`, `-cls`.

Owns: which file fits which architecture, and the models around the networks of models.yolov8_tasks. Answers are those
of exported files (models.exported_images): the outputs are the same. No weights of these are downloaded: their owner
names a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.classification import ClassificationNetwork, Classifier
from models.coco import COCO_CLASSES
from models.detection import check_fits, enlivened, read_core
from models.exported_images import Export, ExportedDetector
from models.exported_layouts import Interpretation
from models.model import Model, PixelNetwork, UnknownModelError, WeightsError
from models.yolov8 import SIZES, STRIDES, Conv, Size, size_of
from models.yolov8_tasks import (
    MASKS,
    ClassifierYOLOv8,
    InstanceYOLOv8,
    PoseYOLOv8,
    SegmentYOLOv8,
    TurnedYOLOv8,
)

Kind = Literal["seg", "pose", "obb", "cls"]
KINDS: tuple[Kind, ...] = ("seg", "pose", "obb", "cls")
ARCHITECTURES: tuple[str, ...] = tuple(f"yolov8{size}-{kind}" for kind in KINDS for size in SIZES)

_SIDES: dict[Kind, int] = {"seg": 640, "pose": 640, "obb": 1024, "cls": 224}
"""Pixels of the square input that the published weights were trained for."""
_COCO_KEYPOINTS = (17, 3)
_AERIAL = ("plane", "ship", "storage tank", "baseball diamond", "tennis court", "basketball court",
           "ground track field", "harbor", "bridge", "large vehicle", "small vehicle", "helicopter", "roundabout",
           "soccer ball field", "swimming pool")  # fmt: skip
_MOST_BATCH = 2**31 - 1


def default_labels(architecture: str) -> tuple[str, ...]:
    """Labels of the published weights: COCO's, "person", DOTA's, ImageNet's by number. Raises UnknownModelError."""
    _, kind = _parts(architecture)
    if kind == "cls":
        return tuple(f"class {number}" for number in range(1000))
    return {"seg": COCO_CLASSES, "pose": ("person",), "obb": _AERIAL}[kind]


def class_count(architecture: str, state: Mapping[str, Tensor]) -> int:
    """Number of classes of a state dict (meta tensors do), which must fit `architecture` in every name and shape.

    Raises UnknownModelError, WeightsError.
    """
    size, kind = _parts(architecture)
    last = state.get("model.9.linear.bias" if kind == "cls" else "model.22.cv3.0.2.bias")
    found = size_of(state)
    if found is None or last is None or last.ndim != 1 or len(last) == 0:
        raise WeightsError(f"The weights are not those of a YOLOv8 network of this kind, so not of {architecture}.")
    if found != size:
        raise WeightsError(f"The weights are of size {found}, not of {architecture}.")
    branch = state.get("model.22.cv4.0.2.bias")
    extras = len(branch) if branch is not None and branch.ndim == 1 else 0
    with torch.device("meta"):
        expected = _core(size, kind, len(last), (extras, 1)).state_dict()
    check_fits(architecture, state, expected)
    return len(last)


def model(name: str, architecture: str, labels: Sequence[str], weights: str, weights_file: str | None) -> Model:
    """The model of an architecture. Raises UnknownModelError, WeightsError."""
    _, kind = _parts(architecture)
    side = _SIDES[kind]
    about = (name, architecture, tuple(labels), weights, weights_file, (side, side, 3))
    if kind == "cls":
        return YOLOv8Classifier(*about, side, "bilinear", True, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    keypoints = _keypoints(architecture, weights_file) if kind == "pose" else None
    task: Literal["segment", "pose", "obb"] = {"seg": "segment", "pose": "pose", "obb": "obb"}[kind]  # type: ignore[assignment]
    extras = {"seg": MASKS, "obb": 1}.get(kind, 0) if keypoints is None else keypoints[0] * keypoints[1]
    how = Interpretation(task, "yolov8", len(labels), extras, strides=STRIDES)
    export = Export(how, (side, side), (1, _MOST_BATCH), False, "letterbox", (0.0,) * 3, (1.0,) * 3, keypoints, "", "")
    return InstanceDetector(*about, export=export)


class InstanceNetwork(PixelNetwork):
    """Such a network as it is served."""

    core: InstanceYOLOv8

    def compute(self, normalised: Tensor) -> tuple[Tensor, ...]:
        """As `InstanceYOLOv8.instances`."""
        return self.core.instances(normalised)


@dataclass(frozen=True)
class InstanceDetector(ExportedDetector):
    """A YOLOv8 whose instances have masks, key points or an angle."""

    def network(self) -> InstanceNetwork:  # type: ignore[override]
        """The network on the CPU: float32, BatchNorm fused, eval mode. Raises WeightsNotFoundError, WeightsError."""
        size, kind = _parts(self.architecture)
        keypoints = self.export.keypoints or _COCO_KEYPOINTS

        def made() -> InstanceYOLOv8:
            return cast(InstanceYOLOv8, _core(size, kind, len(self.labels), keypoints))

        core = enlivened(made) if self.weights == "random" else read_core(self, class_count, made)
        network = InstanceNetwork(cast(InstanceYOLOv8, core.fuse()), self.input_shape, *self.normalisation)
        return network.eval().requires_grad_(False)


@dataclass(frozen=True)
class YOLOv8Classifier(Classifier):
    """A YOLOv8 of classes: short side resized, centre cut out, pixels in 0..1."""

    def network(self) -> ClassificationNetwork:
        """The network on the CPU: float32, BatchNorm fused, eval mode. Raises WeightsNotFoundError, WeightsError."""
        size, _ = _parts(self.architecture)

        def made() -> ClassifierYOLOv8:
            return ClassifierYOLOv8(size, len(self.labels))

        core = _untrained(made, self.input_shape[0]) if self.weights == "random" else read_core(self, class_count, made)
        for module in core.modules():
            if isinstance(module, Conv):
                module.fuse()
        network = ClassificationNetwork(core, self.input_shape, self.mean, self.std)
        return network.eval().requires_grad_(False)


def _core(size: Size, kind: Kind, count: int, keypoints: tuple[int, int]) -> nn.Module:
    if kind == "seg":
        return SegmentYOLOv8(size, count)
    if kind == "pose":
        return PoseYOLOv8(size, count, keypoints)
    return TurnedYOLOv8(size, count) if kind == "obb" else ClassifierYOLOv8(size, count)


def _untrained(made: Callable[[], ClassifierYOLOv8], side: int) -> ClassifierYOLOv8:
    """A classifier whose layers have unit variance and whose logits differ, as `enlivened` makes detectors."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        core = made()
        images = functional.interpolate(torch.rand(8, 3, 16, 16), size=side)
        for module in core.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        core.train()(images)
        weight = core.get_parameter("model.9.linear.weight")
        weight.mul_(2 / core.eval()(images).std())
    return core


def _keypoints(architecture: str, weights_file: str | None) -> tuple[int, int]:
    """Number of key points, and of values of each: what the file says, else 3 values where they fit. WeightsError."""
    if weights_file is None:
        return _COCO_KEYPOINTS
    from models.checkpoint import read_header

    header = read_header(Path(weights_file))
    extras = len(header.state["model.22.cv4.0.2.bias"])
    number, _, values = header.metadata.get("keypoints", "").partition(",")
    if number.isdigit() and values in ("2", "3") and int(number) * int(values) == extras:
        return int(number), int(values)
    each = next((each for each in (3, 2) if extras % each == 0), 0)
    if not each:
        raise WeightsError(f"The weights of {architecture} have {extras} numbers of key points: neither 2 nor 3 each.")
    return extras // each, each


def _parts(architecture: str) -> tuple[Size, Kind]:
    if architecture not in ARCHITECTURES:
        raise UnknownModelError(f"No network is called {architecture}; there are {', '.join(ARCHITECTURES)}.")
    size, _, kind = architecture.removeprefix("yolov8").partition("-")
    return cast(Size, size), cast(Kind, kind)
