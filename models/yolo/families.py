"""Which networks of ours an architecture's name stands for: `yolov8n`, `yolo11s-seg`.

Owns: the families, their sizes and kinds, and the names. Must not know images or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from models.contract.errors import UnknownModelError
from models.yolo import tasks, yolo11, yolov8
from models.yolo.tasks import InstanceYOLOv8
from models.yolo.yolov8 import SIZES, Size, YOLOv8

Kind = Literal["", "seg", "pose", "obb", "cls"]
"""What follows the size in a name; "" detects."""
KINDS: tuple[Kind, ...] = ("", "seg", "pose", "obb", "cls")


@dataclass(frozen=True)
class Family:
    """Networks of one trunk. `prefix`: of its architectures' names; `name`: what people call it.

    `class_bias`: the tensor with a number for each class in state dicts of detectors, and in those of classifiers.
    """

    prefix: str
    name: str
    detector: Callable[[Size, int], YOLOv8]
    instances: Callable[[Size, int, str, tuple[int, int]], InstanceYOLOv8]
    classifier: Callable[[Size, int], nn.Module]
    size_of: Callable[[Mapping[str, Tensor]], Size | None]
    class_bias: tuple[str, str]
    extras_bias: str

    def made(self, size: Size, kind: Kind, count: int, keypoints: tuple[int, int] = (17, 3)) -> nn.Module:
        """The network of `count` classes; `keypoints`: their number and the values of each."""
        if kind == "":
            return self.detector(size, count)
        return self.classifier(size, count) if kind == "cls" else self.instances(size, count, kind, keypoints)


FAMILIES = (
    Family(
        "yolov8",
        "YOLOv8",
        yolov8.YOLOv8,
        InstanceYOLOv8,
        tasks.classifier,
        yolov8.size_of,
        ("model.22.cv3.0.2.bias", "model.9.linear.bias"),
        "model.22.cv4.0.2.bias",
    ),
    Family(
        "yolo11",
        "YOLO11",
        yolo11.YOLO11,
        yolo11.InstanceYOLO11,
        yolo11.classifier,
        yolo11.size_of,
        ("model.23.cv3.0.2.bias", "model.10.linear.bias"),
        "model.23.cv4.0.2.bias",
    ),
)

_PARTS = {
    f"{family.prefix}{size}{kind and '-'}{kind}": (family, size, kind)
    for kind in KINDS
    for family in FAMILIES
    for size in SIZES
}
NAMES = tuple(_PARTS)


def parts_of(architecture: str) -> tuple[Family, Size, Kind]:
    """Raises UnknownModelError."""
    if architecture not in _PARTS:
        raise UnknownModelError(f"No network is called {architecture}; there are {', '.join(_PARTS)}.")
    return _PARTS[architecture]


def named_in(state: Mapping[str, Tensor], kind: Kind) -> str:
    """What a state dict of this kind would be called, "" where it is of no family."""
    for family in FAMILIES:
        size = family.size_of(state)
        if size is not None and family.class_bias[kind == "cls"] in state:
            return f"{family.prefix}{size}{kind and '-'}{kind}"
    return ""
