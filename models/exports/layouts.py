"""What the outputs of exported networks mean, and how they become boxes, scores and classes on the device.

    outputs of the file ─► Interpretation, by their shapes ─► boxes [n, a, 4], scores [n, a], classes [n, a], extras

Owns: the layouts (docs/your-network.md has the table) and how they are told apart by shapes. Must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from models.contract.model import Array
from models.exports.metadata import Description, ImageTask, Layout
from models.onnx.torchvision_detectors import MOST_DETECTIONS
from models.tasks.detect import InstanceTask
from models.tasks.obb import TurnedBoxes
from models.tasks.pose import Pose
from models.tasks.segment import Segment

INSTANCE_TASKS: Mapping[str, type[InstanceTask]] = {
    task.name: task for task in (InstanceTask, Segment, Pose, TurnedBoxes)
}
"""Tasks whose answers are instances, by name."""


@lru_cache(maxsize=64)
def instance_task(name: str, keypoints: tuple[int, int] | None) -> InstanceTask:
    """The task of a model."""
    return INSTANCE_TASKS[name](keypoints)


SIZES: Mapping[str, Array] = MappingProxyType({"orig_target_sizes": np.ones((1, 2), np.int64)})
"""What RT-DETR's own exports and D-FINE's multiply boxes by: so these come in 0 to 1."""
DETR_OUTPUTS = ("labels", "boxes", "scores")

_STRIDES: tuple[tuple[int, ...], ...] = ((8, 16, 32), (4, 8, 16, 32), (8, 16, 32, 64), (16, 32))
_ROWS = (100, 300, 1000)
_LEAST_PROBABILITY = 1e-12


@dataclass(frozen=True)
class Interpretation:
    """How to read a network's outputs. `classes`: their number; `extras`: columns beside box, score and classes.

    `suppressed`: whether the network has done its own suppression. `boxes`, `prototypes`: positions of these outputs.
    """

    task: ImageTask
    layout: Layout
    classes: int
    extras: int = 0
    suppressed: bool = False
    boxes: int = 0
    prototypes: int = 1
    strides: tuple[int, ...] = ()
    transposed: bool = False
    probabilities: bool = False


def interpret(about: Description, shapes: Sequence[Sequence[int]], size: tuple[int, int]) -> Interpretation:
    """How outputs of these shapes (of one image, the batch first) are read. Raises ValueError with what is missing."""
    seen = ", ".join(str(list(shape)) for shape in shapes)
    if about.task == "classify":
        return _classifier(about, shapes, seen)
    if about.task == "adapted":
        return Interpretation("adapted", "adapted", 0)
    if about.layout == "rfdetr":
        return _rfdetr(about, shapes, seen)
    if about.layout == "torchvision":
        if about.task != "detect" or [len(shape) for shape in shapes] != [2, 1, 1] or shapes[0][1] != 4:
            raise ValueError(f"torchvision's detectors are for detect, with outputs [k, 4], [k], [k]; this one: {seen}")
        return Interpretation("detect", "torchvision", len(about.labels or ()), 0, True)
    if about.layout == "detr":
        lengths = [list(shape[1:]) for shape in shapes]
        if about.task != "detect" or len(lengths) != 3 or [lengths[0], [*lengths[0], 4], lengths[0]] != lengths:
            raise ValueError(f"RT-DETR has outputs [n, queries], [n, queries, 4] and [n, queries], not {seen}")
        return Interpretation("detect", "detr", len(about.labels or ()), 0, True, 1)
    boxes, prototypes = _outputs(about, shapes, seen)
    _, first, second = shapes[boxes]
    try:
        extras = INSTANCE_TASKS[about.task].columns(about.keypoints, shapes[prototypes])
    except ValueError as error:
        raise ValueError(f"{error}; its outputs are {seen}") from None
    count = len(about.labels) if about.labels else None
    anchors = {sum((size[0] // s) * (size[1] // s) for s in strides): strides for strides in _STRIDES}
    layout = about.layout or _layout(about, first, second, extras, anchors)
    if layout == "rows" or (layout == "rtdetr" and second == 6 + extras):
        if second != 6 + extras:
            raise ValueError(f"its rows have {second} columns, and {6 + extras} are expected; its outputs are {seen}")
        # Neither wants suppression: RT-DETR's rows are its queries, which name their class.
        named = 0 if layout == "rtdetr" else count or 0
        return Interpretation(about.task, layout, named, extras, True, boxes, prototypes, transposed=False)
    if layout == "rtdetr":
        found = second - 4 - extras
        _check_count(found, count, seen)
        return Interpretation(about.task, layout, found, extras, True, boxes, prototypes)
    if layout == "yolov8":
        transposed = first in anchors and second not in anchors
        columns, places = (second, first) if transposed else (first, second)
        found = columns - 4 - extras
        _check_count(found, count, seen)
        return Interpretation(
            *(about.task, layout, found, extras, False, boxes, prototypes),
            strides=anchors.get(places, ()),
            transposed=transposed,
        )
    if layout in ("yolov5", "yolox"):
        found = second - 5 - extras
        _check_count(found, count, seen)
        strides = {3 * number: each for number, each in anchors.items()} if layout == "yolov5" else anchors
        if layout == "yolox" and first not in anchors:
            raise ValueError(f"YOLOX at {size[0]} x {size[1]} has other anchors than {first}; its outputs are {seen}")
        return Interpretation(
            about.task, layout, found, extras, False, boxes, prototypes, strides=strides.get(first, ())
        )
    raise ValueError(f"the layout of its outputs is not known ({seen}): state it in its sidecar, for example yolov8")


def _rfdetr(about: Description, shapes: Sequence[Sequence[int]], seen: str) -> Interpretation:
    """Boxes [n, queries, 4], and logits [n, queries, slots] of their classes; a slot after the labels is background."""
    threes = [index for index, shape in enumerate(shapes) if len(shape) == 3]
    if about.task != "detect" or len(threes) != 2 or len({shapes[index][1] for index in threes}) != 1:
        raise ValueError(f"RF-DETR has outputs [n, queries, 4] and [n, queries, classes], not {seen}")
    boxes, logits = threes if shapes[threes[0]][2] == 4 else reversed(threes)
    slots = shapes[logits][2]
    count = len(about.labels) if about.labels else slots
    if shapes[boxes][2] != 4 or not 1 <= count <= slots <= count + 1:
        raise ValueError(f"its outputs are of {slots} classes, and there are {count} labels: {seen}")
    return Interpretation("detect", "rfdetr", count, 0, True, boxes, logits)


def _classifier(about: Description, shapes: Sequence[Sequence[int]], seen: str) -> Interpretation:
    found = [shape for shape in shapes if len(shape) == 2 or (len(shape) == 4 and shape[2:] == [1, 1])]
    if len(shapes) != 1 or not found:
        raise ValueError(f"a classifier has one output [n, classes]; this network's outputs are {seen}")
    _check_count(found[0][1], len(about.labels) if about.labels else None, seen)
    return Interpretation("classify", "classes", found[0][1], probabilities=about.scores == "probabilities")


def _outputs(about: Description, shapes: Sequence[Sequence[int]], seen: str) -> tuple[int, int]:
    """Which outputs hold boxes and prototypes."""
    threes = [index for index, shape in enumerate(shapes) if len(shape) == 3]
    fours = [index for index, shape in enumerate(shapes) if len(shape) == 4]
    if INSTANCE_TASKS[about.task].has_prototypes:
        if len(threes) != 1 or len(fours) != 1:
            raise ValueError(f"a network of masks has outputs [n, columns, anchors] and [n, m, h, w], not {seen}")
        return threes[0], fours[0]
    if not threes:
        raise ValueError(f"a detector has an output [n, columns, anchors] or [n, rows, columns], not {seen}")
    return threes[0], -1


def _layout(
    about: Description, first: int, second: int, extras: int, anchors: dict[int, tuple[int, ...]]
) -> Layout | None:
    count = len(about.labels) if about.labels else None
    if count is not None:
        columns = 4 + count + extras
        if first == columns and second != 6 + extras:
            return "yolov8"
        if first == columns and second in anchors and first != 6 + extras:
            return "yolov8"
        if second == columns and first in anchors:
            return "yolov8"
        if second == columns + 1 and first in {3 * number for number in anchors}:
            return "yolov5"
    if second == 6 + extras and (first in _ROWS or about.end_to_end):
        return "rows"
    if second in anchors and first > 4 + extras:
        return "yolov8"
    if first in {3 * number for number in anchors} and second > 5 + extras:
        return "yolov5"
    return None


def _check_count(found: int, stated: int | None, seen: str) -> None:
    if found < 1:
        raise ValueError(f"its outputs leave no room for classes: {seen}")
    if stated is not None and found != stated:
        raise ValueError(f"its outputs are of {found} classes, and there are {stated} labels: {seen}")


def decoded(how: Interpretation, outputs: Sequence[Tensor], size: tuple[int, int]) -> tuple[Tensor, ...]:
    """float32 outputs of the file -> boxes [n, a, 4], scores [n, a], classes int32 [n, a], then extras [n, a, e] where
    there are any, and prototypes [n, m, h, w] of masks. Of a classifier: logits [n, classes].

    Boxes are x1, y1, x2, y2 in pixels of the input; of turned ones centre x, y, width and height, the angle in extras.
    """
    if how.task == "adapted":
        return tuple(each.contiguous() for each in outputs)
    if how.task == "classify":
        logits = outputs[0].flatten(1)
        return (logits.clamp_min(_LEAST_PROBABILITY).log() if how.probabilities else logits,)
    raw = outputs[how.boxes]
    if how.layout == "torchvision":
        return _filled_up(outputs)
    if how.layout == "detr":
        labels, _, scores = outputs
        return _stretched(raw, size), scores.contiguous(), labels.to(torch.int32)
    if how.layout == "rfdetr":
        # As many instances as queries, the best of all pairs of a query and a class.
        probabilities = outputs[how.prototypes][..., : how.classes].sigmoid()
        scores, places = probabilities.flatten(1).topk(raw.shape[1], dim=1)
        queries = (places // how.classes).unsqueeze(2).expand(-1, -1, 4)
        return _scaled(raw.gather(1, queries), size), scores, (places % how.classes).to(torch.int32)
    if how.layout == "rows":
        boxes, scores, classes, extras = raw[..., :4], raw[..., 4], raw[..., 5].round(), raw[..., 6:]
    elif how.layout == "rtdetr" and how.classes == 0:
        boxes, scores, classes, extras = _scaled(raw[..., :4], size), raw[..., 4], raw[..., 5].round(), raw[..., 6:]
    else:
        if how.layout == "yolov8" and not how.transposed:
            raw = raw.transpose(1, 2)
        first = 5 if how.layout in ("yolov5", "yolox") else 4
        probabilities = raw[..., first : first + how.classes]
        extras = raw[..., first + how.classes :]
        scores, classes = probabilities.max(dim=2)
        centred = raw[..., :4]
        if first == 5:
            scores = scores * raw[..., 4]
        if how.layout == "yolox":
            centred = _yolox(centred, how.strides, size)
        if how.layout == "rtdetr":
            boxes = _scaled(centred, size)
        elif INSTANCE_TASKS[how.task].turned:
            boxes = centred
        else:
            boxes = _corners(centred)
    found = [boxes.contiguous(), scores.contiguous(), classes.to(torch.int32)]
    if how.extras:
        found.append(extras.contiguous())
    if INSTANCE_TASKS[how.task].has_prototypes:
        found.append(outputs[how.prototypes])
    return tuple(found)


def _filled_up(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As many boxes as an image has -> the best `MOST_DETECTIONS`, followed by some of score 0."""
    boxes, scores, given = outputs
    # Numbers of the host, where the file fixes them.
    labels = torch.as_tensor(given, dtype=torch.int64, device=boxes.device)
    scores, places = torch.cat((scores, scores.new_zeros(MOST_DETECTIONS))).sort(descending=True, stable=True)
    places = places[:MOST_DETECTIONS]
    boxes = torch.cat((boxes, boxes.new_zeros((MOST_DETECTIONS, 4))))[places]
    labels = torch.cat((labels, labels.new_zeros(MOST_DETECTIONS)))[places]
    return boxes[None], scores[None, :MOST_DETECTIONS], labels[None].to(torch.int32)


def _corners(centred: Tensor) -> Tensor:
    half = centred[..., 2:] / 2
    return torch.cat((centred[..., :2] - half, centred[..., :2] + half), dim=2)


def _scaled(centred: Tensor, size: tuple[int, int]) -> Tensor:
    return _corners(_stretched(centred, size))


def _stretched(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    height, width = size
    return boxes * torch.tensor([width, height, width, height], dtype=boxes.dtype, device=boxes.device)


def _yolox(raw: Tensor, strides: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """Offsets to cells and logarithms of sides -> centres and sides in pixels."""
    grids, steps = [], []
    for stride in strides:
        rows, columns = size[0] // stride, size[1] // stride
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        grids.append(torch.stack((x, y), dim=2).reshape(-1, 2))
        steps.append(torch.full((rows * columns, 1), stride))
    grid, step = (torch.cat(each).to(raw) for each in (grids, steps))
    return torch.cat(((raw[..., :2] + grid) * step, raw[..., 2:].exp() * step), dim=2)


Resize = Literal["letterbox", "stretch", "top-left"]


def resize_of(about: Description, how: Interpretation) -> Resize:
    """How images are brought to the network's size, where nobody says."""
    if about.resize:
        return about.resize
    if how.layout in ("rtdetr", "detr", "rfdetr"):
        return "stretch"
    return "top-left" if how.layout == "yolox" else "letterbox"
