"""anychip's YOLOv8, YOLO11 and YOLO26: `yolov8n` detects; `-seg`, `-pose`, `-obb` and `-cls` name the other tasks.

Owns: the families of networks and the names of architectures, checking that a file fits one, and the models around the
networks of this package. Only weights of detectors are downloaded; for the others the user names a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.classifiers import ClassificationNetwork
from models.contract.errors import UnknownModelError, WeightsError
from models.contract.networks import PixelNetwork
from models.contract.pixel_model import PixelModel
from models.contract.resize import Centre, Resize, Whole
from models.contract.task_adapter import AdaptedFile
from models.tasks.coco import COCO_CLASSES
from models.weights.checkpoint import Checkpoint, read
from models.weights.state import Fitted, check_fits, read_state
from models.yolo.yolo11 import YOLO11, YOLO26, InstanceYOLO11, InstanceYOLO26
from models.yolo.yolov8 import SIZES, STRIDES, Conv, InstanceYOLOv8, Size, YOLOv8

Kind = Literal["", "seg", "pose", "obb", "cls"]
"""Suffix after the size in a name; "" detects."""
KINDS: tuple[Kind, ...] = ("", "seg", "pose", "obb", "cls")


class Family(NamedTuple):
    """Networks of one trunk, and its common name."""

    name: str
    detector: type[YOLOv8]
    instances: type[InstanceYOLOv8]

    def made(self, size: Size, kind: Kind, count: int, keypoints: tuple[int, int] = (17, 3)) -> nn.Module:
        """Build the network of `count` classes; `keypoints`: their number and the values of each."""
        if kind == "":
            return self.detector(size, count)
        return self.detector.classifier(size, count) if kind == "cls" else self.instances(size, count, kind, keypoints)

    def class_bias(self, kind: Kind) -> str:
        """Return the name of the tensor with a number for each class in a state dict."""
        of = self.detector
        return f"model.{of.classifier_layer}.linear.bias" if kind == "cls" else f"model.{of.head_layer}.cv3.0.2.bias"

    def extras(self, state: Mapping[str, Tensor]) -> int:
        """Return the count of each anchor's numbers beside box and classes in a state dict."""
        names = [f"model.{self.detector.head_layer}.{branch}.bias" for branch in ("cv4.0.2", "cv4_kpts.0")]
        biases = [state[name] for name in names if name in state]
        return len(biases[0]) if biases and biases[0].ndim == 1 else 0


FAMILIES = (  # YOLO26 before YOLO11, as layers that both have tell YOLO11's sizes.
    Family("YOLOv8", YOLOv8, InstanceYOLOv8),
    Family("YOLO26", YOLO26, InstanceYOLO26),
    Family("YOLO11", YOLO11, InstanceYOLO11),
)

_PARTS = {
    f"{family.name.lower()}{size}{kind and '-'}{kind}": (family, size, kind)
    for kind in KINDS
    for family in FAMILIES
    for size in SIZES
    if (family.name, kind) != ("YOLO26", "cls")  # YOLO26's classifiers are YOLO11's.
}
ARCHITECTURES: tuple[str, ...] = tuple(_PARTS)


def parts_of(architecture: str) -> tuple[Family, Size, Kind]:
    """Return the family, size and kind of an architecture. Raises UnknownModelError."""
    if architecture not in _PARTS:
        raise UnknownModelError(f"No network is called {architecture}; there are {', '.join(_PARTS)}.")
    return _PARTS[architecture]


def named_in(state: Mapping[str, Tensor], kind: Kind) -> str:
    """Return the architecture of a state dict of this kind, "" if it is of no family."""
    for family in FAMILIES:
        size = family.detector.size_of(state)
        if size is not None and family.class_bias(kind) in state:
            return f"{family.name.lower()}{size}{kind and '-'}{kind}"
    return ""


def architecture_of(state: Mapping[str, Tensor]) -> str:
    """Return a state dict's architecture by its layers, "" without a family; its shapes remain to be compared."""
    extras = max(family.extras(state) for family in FAMILIES)
    kind: Kind = "" if not extras else "obb" if extras == 1 else "pose"
    if any(".proto." in name for name in state):
        kind = "seg"
    return named_in(state, kind) or named_in(state, "cls")


MOST_ANCHORS = 2_048
"""Most anchors of an image that leave the device: a quarter of those of 640 x 640 pixels. An instance has a dozen at
most over the default threshold; more only at a threshold near 0. TensorRT's TopK ends at 3,840.
"""

_AERIAL = (
    "plane,ship,storage tank,baseball diamond,tennis court,basketball court,ground track field,harbor,bridge,"
    "large vehicle,small vehicle,helicopter,roundabout,soccer ball field,swimming pool"
)
_COCO_KEYPOINTS = (17, 3)


@dataclass(frozen=True)
class _Published:
    """Published weights of a kind: the task, the side of the square input, and the labels."""

    task: str
    side: int
    labels: tuple[str, ...]


_KINDS: Mapping[Kind, _Published] = {
    "": _Published("detect", 640, COCO_CLASSES),
    "seg": _Published("segment", 640, COCO_CLASSES),
    "pose": _Published("pose", 640, ("person",)),
    "obb": _Published("obb", 1024, tuple(_AERIAL.split(","))),
    "cls": _Published("classify", 224, tuple(f"class {number}" for number in range(1000))),
}


def default_labels(architecture: str) -> tuple[str, ...]:
    """Return the published weights' labels: COCO's, "person", DOTA's, ImageNet's numbers. Raises UnknownModelError."""
    return _KINDS[parts_of(architecture)[2]].labels


def fitted(architecture: str, found: Checkpoint) -> Fitted:
    """Fit a checkpoint, in every name and shape. Meta tensors suffice. Raises UnknownModelError, WeightsError."""
    state = found.state
    family, size, kind = parts_of(architecture)
    last, named = state.get(family.class_bias(kind)), named_in(state, kind)
    if named and named != architecture:
        raise WeightsError(f"The weights are of {'the size of ' if kind else ''}{named}, not of {architecture}.")
    if not named or last is None or last.ndim != 1 or len(last) == 0:
        what = f"{family.name} {'network of this kind' if kind else 'detector'}"
        raise WeightsError(f"The weights are not those of a {what}, so not of {architecture}.")
    keypoints = _keypoints(architecture, state) if kind == "pose" else _COCO_KEYPOINTS
    with torch.device("meta"):
        network = family.made(size, kind, len(last), keypoints)
    used = {name: tensor for name, tensor in state.items() if not name.startswith(family.detector.unused)}
    check_fits(architecture, used, network.state_dict())
    return Fitted(found, len(last), network)


class DetectionNetwork(PixelNetwork):
    """A detector in its served form: the best class of the best anchors, boxes still relative to their anchors."""

    core: YOLOv8

    def compute(self, normalised: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return distances, scores, classes and anchors of `MOST_ANCHORS`, by descending score.

        distances: float32 [n, k, 4], left, top, right, bottom in strides; scores: float32 [n, k] in 0..1; classes and
        anchors: int32 [n, k].
        """
        # While tracing, the tensor's own size is no number; the input's is the served one.
        height, width = self.input_shape[:2] if torch._C._get_tracing_state() else tuple(normalised.shape[2:])
        count = sum((height // stride) * (width // stride) for stride in STRIDES)
        distances, logits, classes, anchors = self.core.best(normalised, min(MOST_ANCHORS, count))
        return distances, logits.sigmoid(), classes.to(torch.int32), anchors.to(torch.int32)


class InstanceNetwork(PixelNetwork):
    """A network of masks, poses or turned boxes in its served form."""

    core: InstanceYOLOv8

    def compute(self, normalised: Tensor) -> tuple[Tensor, ...]:
        return self.core.instances(normalised)


@dataclass(frozen=True)
class YOLO(PixelModel):
    """A YOLOv8, YOLO11 or YOLO26 of any kind. Sides of the input must be multiples of 32."""

    @classmethod
    def of(
        cls,
        name: str,
        architecture: str,
        labels: Sequence[str],
        weights: str,
        weights_file: str | None,
        *,
        size: tuple[int, int] | None = None,
    ) -> YOLO:
        """Build the model of an architecture. `size`: of its input. None: that of its training, from its file, or of
        its published weights.

        Raises UnknownModelError, WeightsError.
        """
        kind = parts_of(architecture)[2]
        header = None if weights_file is None else read(Path(weights_file), with_data=False)
        side = _side(kind, "" if header is None else header.metadata.get("imgsz", ""))
        height, width = size or (side, side)
        options = {}
        if kind == "pose":
            stated = header and _keypoints(architecture, header.state, header.metadata.get("keypoints", ""))
            options["keypoints"] = stated or _COCO_KEYPOINTS
        resize: Resize = Whole((height, width))
        if kind == "cls":
            # Ultralytics cuts a square out of the centre, but stretches the image to any other shape.
            whole = None if height == width else (height, width)
            resize = Centre((height, width), min(height, width), by="pillow", shape=whole)
        file = AdaptedFile(
            resize,
            tuple(labels),
            options=json.dumps(options),
            strides=() if kind == "cls" else STRIDES,
            distances=kind == "",
        )
        shape = (height, width, 3)
        return cls(name, architecture, file.labels, weights, weights_file, shape, _KINDS[kind].task, file)

    def network(self) -> PixelNetwork:
        """Build the network on the CPU: float32, BatchNorm fused, eval. Raises WeightsNotFoundError, WeightsError."""
        family, size, kind = parts_of(self.architecture)
        keypoints = self.file.option("keypoints", _COCO_KEYPOINTS)

        def made() -> nn.Module:
            return family.made(size, kind, len(self.labels), tuple(keypoints))

        if self.weights == "random":
            core = enlivened(made, self.input_shape[0])
        else:
            state = read_state(self, fitted).found.state
            with torch.device("meta"):
                core = made()
            core.to_empty(device="cpu")
            core.load_state_dict(state, strict=False)
        for module in core.modules():
            if isinstance(module, Conv):
                module.fuse()
        around = {"": DetectionNetwork, "cls": ClassificationNetwork}.get(kind, InstanceNetwork)
        return around(core, self.input_shape, self.mean, self.std).eval().requires_grad_(False)


def enlivened(made: Callable[[], nn.Module], side: int) -> nn.Module:
    """Build an untrained network that is alive: layers of unit variance, and candidates on most images.

    Default weights alone fade out layer by layer. So BatchNorm is measured on coloured blocks under noise, and the
    class branches are scaled so that about one anchor in 200 of those passes a score of 0.25.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        core = made()
        for module in core.train().modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        if not isinstance(core, YOLOv8):
            images = functional.interpolate(torch.rand(8, 3, 16, 16), size=side)
            core(images)
            weight = next(each for each in core.modules() if isinstance(each, nn.Linear)).weight
            weight.mul_(2 / core.eval()(images).std())
            return core
        blocks, noise = (functional.interpolate(torch.rand(8, 3, side, side), size=128) for side in (4, 32))
        images = 0.9 * (blocks > 0.5) + 0.1 * noise
        if isinstance(core, InstanceYOLOv8):
            core.instances(images)  # Branches that `raw` does not run.
        for branch, level in zip(core.head.cv3, core.raw(images), strict=True):
            weight, bias = branch.get_parameter("2.weight"), branch.get_parameter("2.bias")
            logits = level[:, core.head.box_channels :] - bias.view(-1, 1, 1)
            gain = 1 / logits.std()
            weight.mul_(gain)
            bias.copy_(log(0.25 / 0.75) - (logits.amax(dim=1) * gain).quantile(0.995))
    return core


def _side(kind: Kind, trained: str) -> int:
    side = int(trained) if trained.isdigit() and len(trained) < 5 else 0
    if not side:
        return _KINDS[kind].side
    return side if kind == "cls" else -(-side // 32) * 32


def _keypoints(architecture: str, state: Mapping[str, Tensor], stated: str = "") -> tuple[int, int]:
    """Return the number of key points, and their values each: `stated`, else 3 if they fit. Raises WeightsError."""
    extras = parts_of(architecture)[0].extras(state)
    number, _, values = stated.partition(",")
    if number.isdigit() and values in ("2", "3") and int(number) * int(values) == extras:
        return int(number), int(values)
    deviations = state.get("model.23.cv4_sigma.0.bias")  # YOLO26's: two for each key point.
    if deviations is not None and extras % max(1, deviations.numel() // 2) == 0 and deviations.numel() > 1:
        return deviations.numel() // 2, extras // (deviations.numel() // 2)
    each = next((each for each in (3, 2) if extras % each == 0), 0)
    if not extras or not each:
        raise WeightsError(f"The weights of {architecture} have {extras} numbers of key points: neither 2 nor 3 each.")
    return extras // each, each
