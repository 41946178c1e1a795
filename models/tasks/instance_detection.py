"""Our own YOLOv8 and YOLO11 for masks, poses, turned boxes and classes: `yolov8n-seg`, `-pose`, `-obb`, `-cls`.

Owns: which file fits which architecture, and the models around the networks of models.yolo.tasks. Answers are those
of exported files (models.exports.images): the outputs are the same. No weights of these are downloaded: their owner
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

from models.contract.errors import WeightsError
from models.contract.model import Model, PixelNetwork
from models.exports.images import Export, ExportedDetector
from models.exports.layouts import Interpretation
from models.tasks.classification import ClassificationNetwork, Classifier
from models.tasks.coco import COCO_CLASSES
from models.tasks.detection import check_fits, enlivened, read_core
from models.yolo.families import INSTANCE_ARCHITECTURES, Kind, named_in, parts_of
from models.yolo.tasks import MASKS, InstanceYOLOv8
from models.yolo.yolov8 import STRIDES, Conv

ARCHITECTURES: tuple[str, ...] = INSTANCE_ARCHITECTURES

_SIDES: dict[Kind, int] = {"seg": 640, "pose": 640, "obb": 1024, "cls": 224}
"""Pixels of the square input that the published weights were trained for."""
_COCO_KEYPOINTS = (17, 3)
_AERIAL = ("plane", "ship", "storage tank", "baseball diamond", "tennis court", "basketball court",
           "ground track field", "harbor", "bridge", "large vehicle", "small vehicle", "helicopter", "roundabout",
           "soccer ball field", "swimming pool")  # fmt: skip
_MOST_BATCH = 2**31 - 1


def default_labels(architecture: str) -> tuple[str, ...]:
    """Labels of the published weights: COCO's, "person", DOTA's, ImageNet's by number. Raises UnknownModelError."""
    _, _, kind = parts_of(architecture)
    if kind == "cls":
        return tuple(f"class {number}" for number in range(1000))
    return {"pose": ("person",), "obb": _AERIAL}.get(kind, COCO_CLASSES)


def class_count(architecture: str, state: Mapping[str, Tensor]) -> int:
    """Number of classes of a state dict (meta tensors do), which must fit `architecture` in every name and shape.

    Raises UnknownModelError, WeightsError.
    """
    family, size, kind = parts_of(architecture)
    last, found = state.get(family.class_bias[kind == "cls"]), named_in(state, kind)
    if found and found != architecture:
        raise WeightsError(f"The weights are of the size of {found}, not of {architecture}.")
    if not found or last is None or last.ndim != 1 or len(last) == 0:
        network = f"{family.name} network of this kind"
        raise WeightsError(f"The weights are not those of a {network}, so not of {architecture}.")
    branch = state.get(family.extras_bias)
    extras = len(branch) if branch is not None and branch.ndim == 1 else 0
    with torch.device("meta"):
        expected = family.made(size, kind, len(last), (extras, 1)).state_dict()
    check_fits(architecture, state, expected)
    return len(last)


def model(name: str, architecture: str, labels: Sequence[str], weights: str, weights_file: str | None) -> Model:
    """The model of an architecture. Raises UnknownModelError, WeightsError."""
    _, _, kind = parts_of(architecture)
    side = _SIDES[kind]
    about = (name, architecture, tuple(labels), weights, weights_file, (side, side, 3))
    if kind == "cls":
        return YOLOClassifier(*about, side, "bilinear", True, (0.0,) * 3, (1.0,) * 3, resize_by="pillow")
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
        """Return what `InstanceYOLOv8.instances` does."""
        return self.core.instances(normalised)


@dataclass(frozen=True)
class InstanceDetector(ExportedDetector):
    """A YOLOv8 or YOLO11 whose instances have masks, key points or an angle."""

    def network(self) -> InstanceNetwork:  # type: ignore[override]
        """The network on the CPU: float32, BatchNorm fused, eval mode. Raises WeightsNotFoundError, WeightsError."""
        family, size, kind = parts_of(self.architecture)
        keypoints = self.export.keypoints or _COCO_KEYPOINTS

        def made() -> InstanceYOLOv8:
            return cast(InstanceYOLOv8, family.made(size, kind, len(self.labels), keypoints))

        core = enlivened(made) if self.weights == "random" else read_core(self, class_count, made)
        network = InstanceNetwork(cast(InstanceYOLOv8, core.fuse()), self.input_shape, *self.normalisation)
        return network.eval().requires_grad_(False)


@dataclass(frozen=True)
class YOLOClassifier(Classifier):
    """A YOLOv8 or YOLO11 of classes: short side resized by Pillow, centre cut out, pixels in 0..1."""

    def network(self) -> ClassificationNetwork:
        """The network on the CPU: float32, BatchNorm fused, eval mode. Raises WeightsNotFoundError, WeightsError."""
        family, size, _ = parts_of(self.architecture)

        def made() -> nn.Module:
            return family.classifier(size, len(self.labels))

        core = _untrained(made, self.input_shape[0]) if self.weights == "random" else read_core(self, class_count, made)
        for module in core.modules():
            if isinstance(module, Conv):
                module.fuse()
        network = ClassificationNetwork(core, self.input_shape, self.mean, self.std)
        return network.eval().requires_grad_(False)


def _untrained(made: Callable[[], nn.Module], side: int) -> nn.Module:
    """A classifier whose layers have unit variance and whose logits differ, as `enlivened` makes detectors."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        core = made()
        images = functional.interpolate(torch.rand(8, 3, 16, 16), size=side)
        for module in core.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        core.train()(images)
        weight = next(each for each in core.modules() if isinstance(each, nn.Linear)).weight
        weight.mul_(2 / core.eval()(images).std())
    return core


def _keypoints(architecture: str, weights_file: str | None) -> tuple[int, int]:
    """Number of key points, and of values of each: what the file says, else 3 values where they fit. WeightsError."""
    if weights_file is None:
        return _COCO_KEYPOINTS
    from models.weights.checkpoint import read_header

    header = read_header(Path(weights_file))
    extras = len(header.state[parts_of(architecture)[0].extras_bias])
    number, _, values = header.metadata.get("keypoints", "").partition(",")
    if number.isdigit() and values in ("2", "3") and int(number) * int(values) == extras:
        return int(number), int(values)
    each = next((each for each in (3, 2) if extras % each == 0), 0)
    if not each:
        raise WeightsError(f"The weights of {architecture} have {extras} numbers of key points: neither 2 nor 3 each.")
    return extras // each, each
