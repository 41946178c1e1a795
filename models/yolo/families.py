"""Networks of ours by the names of architectures: `yolov8n`, `yolo11s-seg`.

Owns: the families, their sizes and kinds, and the names. Must not know images or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from models.contract.errors import UnknownModelError
from models.yolo import tasks, yolo11, yolo26, yolov8
from models.yolo.tasks import InstanceYOLOv8
from models.yolo.yolov8 import SIZES, Size, YOLOv8

Kind = Literal["", "seg", "pose", "obb", "cls"]
"""Suffix after the size in a name; "" detects."""
KINDS: tuple[Kind, ...] = ("", "seg", "pose", "obb", "cls")


@dataclass(frozen=True)
class Family:
    """Networks of one trunk. `prefix`: of its architectures' names; `name`: its common name.

    `class_bias`: the tensor with a number for each class in state dicts of detectors, and in those of classifiers.
    `extras_bias`: tensors with each anchor's numbers beside box and classes. `unused`: beginnings of names in state
    dicts that are left out.
    """

    prefix: str
    name: str
    detector: Callable[[Size, int], YOLOv8]
    instances: Callable[[Size, int, str, tuple[int, int]], InstanceYOLOv8]
    classifier: Callable[[Size, int], nn.Module]
    size_of: Callable[[Mapping[str, Tensor]], Size | None]
    class_bias: tuple[str, str]
    extras_bias: tuple[str, ...]
    unused: tuple[str, ...] = ()

    def made(self, size: Size, kind: Kind, count: int, keypoints: tuple[int, int] = (17, 3)) -> nn.Module:
        """Build the network of `count` classes; `keypoints`: their number and the values of each."""
        if kind == "":
            return self.detector(size, count)
        return self.classifier(size, count) if kind == "cls" else self.instances(size, count, kind, keypoints)

    def extras(self, state: Mapping[str, Tensor]) -> int:
        """Return the count of each anchor's numbers beside box and classes in a state dict."""
        biases = [state[name] for name in self.extras_bias if name in state]
        return len(biases[0]) if biases and biases[0].ndim == 1 else 0


FAMILIES = (  # YOLO26 before YOLO11, as layers that both have tell YOLO11's sizes.
    Family(
        "yolov8",
        "YOLOv8",
        yolov8.YOLOv8,
        InstanceYOLOv8,
        tasks.classifier,
        yolov8.size_of,
        ("model.22.cv3.0.2.bias", "model.9.linear.bias"),
        ("model.22.cv4.0.2.bias",),
    ),
    Family(
        "yolo26",
        "YOLO26",
        yolo26.YOLO26,
        yolo26.InstanceYOLO26,
        yolo11.classifier,
        yolo26.size_of,
        ("model.23.cv3.0.2.bias", "model.10.linear.bias"),
        ("model.23.cv4.0.2.bias", "model.23.cv4_kpts.0.bias"),
        yolo26.UNUSED,
    ),
    Family(
        "yolo11",
        "YOLO11",
        yolo11.YOLO11,
        yolo11.InstanceYOLO11,
        yolo11.classifier,
        yolo11.size_of,
        ("model.23.cv3.0.2.bias", "model.10.linear.bias"),
        ("model.23.cv4.0.2.bias",),
    ),
)

_PARTS = {
    f"{family.prefix}{size}{kind and '-'}{kind}": (family, size, kind)
    for kind in KINDS
    for family in FAMILIES
    for size in SIZES
    if (family.prefix, kind) != ("yolo26", "cls")  # YOLO26's classifiers are YOLO11's.
}
NAMES = tuple(_PARTS)


def parts_of(architecture: str) -> tuple[Family, Size, Kind]:
    """Return the family, size and kind of an architecture. Raises UnknownModelError."""
    if architecture not in _PARTS:
        raise UnknownModelError(f"No network is called {architecture}; there are {', '.join(_PARTS)}.")
    return _PARTS[architecture]


def named_in(state: Mapping[str, Tensor], kind: Kind) -> str:
    """Return the architecture of a state dict of this kind, "" if it is of no family."""
    for family in FAMILIES:
        size = family.size_of(state)
        if size is not None and family.class_bias[kind == "cls"] in state:
            return f"{family.prefix}{size}{kind and '-'}{kind}"
    return ""


def architecture_of(state: Mapping[str, Tensor]) -> str:
    """Return a state dict's architecture by its layers, "" without a family; its shapes remain to be compared."""
    extras = max(family.extras(state) for family in FAMILIES)
    kind: Kind = "" if not extras else "obb" if extras == 1 else "pose"
    if any(".proto." in name for name in state):
        kind = "seg"
    return named_in(state, kind) or named_in(state, "cls")
