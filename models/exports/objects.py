"""Check of a detector's numbers on pictures: boxes, scores and classes are what its layout says.

    outputs for pictures ─► Interpretation, completed or refused

Owns: what a box, a score and a class can be. Shapes alone do not tell corners from centres, pixels from shares of the
image, nor probabilities from logits. Must not know files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.exports.layouts import QUERIES, Interpretation, Size, cells_of, decoded
from models.exports.metadata import Description

FROM_1 = "in the pictures of the trial it found no class 0: if its first class is 1, put a name for 0 before its labels"
NOTHING = "it found nothing in the pictures of the trial: the order and the scale of its boxes were not checked"
_ROUNDING = 1e-2
"""Error of a probability, a class and a corner in pixels that a network in int8 or float16 makes."""
_REACH = 2.0
"""Greatest coordinate of boxes in shares of the image, which may reach over its edges, and least of those in pixels."""
_HUGE, _HEAP = 10.0, 0.1
"""Greatest side of a box, which is huge if it is decoded twice, and least way between those of all cells, as shares."""
_DECODED = {
    "yolox": 'if it decodes them, state "layout": "yolov5", "input": "levels", "channels": "bgr", "resize": "top-left"',
    "yolov5": 'if it does not decode them, as YOLOX, state "layout": "yolox"',
}
_COUNTS = 0.05
"""Least score of a box that is looked at, as a share of the greatest: a network may fill up with anything."""
_FEW = 0.1
"""Share of boxes that may have their corners in the wrong order."""
_MOSTLY = 0.7
"""Share of queries that find no object, at least: a picture has few objects, and a DETR has 100 queries or more."""
_TURN = 6.3
"""Greatest angle, in radians."""
_MOVED, _ALONG = 0.4, 2.0
"""Least way of the mean box, as a share of the image, that tells its axes: and how much longer than along the other."""
_MANY, _NEARLY_ALL = 30, 0.99
"""Least number of boxes of which nearly all are corners if they look like them."""
_CELLS, _UNEVEN = 21, 0.3
"""Number that divides that of the cells of three strides, and the mean way from their middles to those of even rows of
boxes, as a share of the image, that is too long for boxes around these cells; 0.25 is that of boxes all in the middle.
"""
_CORNER = 0.1
"""Error of the mean way from a cell to its box: to the corner, as a share of the box, to the middle, of the image."""
_CANDIDATES = ("yolov8", "yolov5", "yolox")
_ROWS = ("rows", "mmdeploy", "end2end", "torchvision")
"""Layouts with corners in pixels."""


def located(
    about: Description, how: Interpretation, pictures: Sequence[Sequence[Tensor]], size: Size
) -> tuple[Interpretation, str]:
    """Find how a detector's numbers are read, by its float32 outputs for batches of pictures.

    Return the completed interpretation, and a note to its owner. Raises ValueError for numbers that the layout cannot
    have.
    """
    how = _with_boxes(how, pictures)
    if how.logits >= 0 and all(_is_inside(outputs[how.logits]) for outputs in pictures):
        raise ValueError(f'the layout "{how.layout}" has logits, and its scores are in 0 to 1 already')
    if how.layout == "softmax" and not about.exporter:
        best = torch.cat([outputs[how.logits].argmax(2).flatten() for outputs in pictures])
        if float((best == 0).float().mean()) > _MOSTLY and not bool((best == how.classes).any()):
            raise ValueError(
                f'the layout "{how.layout}" has "no object" as its last class, and most of its queries find the first '
                "one, and none the last: let the network give logits[..., [*range(1, n), 0]]"
            )
    if how.layout == "rtdetr" and not how.classes and not _are_whole(_classes(how, pictures)):
        how = replace(how, classes=2)  # [n, queries, 6] with a score for each of two classes.
    if about.scores is not None:
        how = _with_sigmoid(about, how, pictures)
    found = _decoded(how, pictures, size)
    boxes, scores = found[:2]
    if not len(scores):
        return how, "" if about.exporter else NOTHING
    _check_scores(how, scores)
    counted = _counted(scores)
    note = ""
    if how.layout not in _CANDIDATES and (how.layout != "rtdetr" or not how.classes):
        note = _check_classes(about, how, pictures, counted)
    if how.takes == "turned" and not about.exporter and float(found[3].abs().max()) > _TURN:
        raise ValueError(f"its angles reach {float(found[3].abs().max()):.3g}, and radians are expected")
    reach = float(boxes[counted].abs().max()) if bool(counted.any()) else 0.0
    in_shares = how.layout not in (*QUERIES, "rtdetr") and 0 < reach <= _REACH
    if how.layout == "yolox":
        ways = torch.cat(_columns(how, pictures))[..., :2] - cells_of(how.strides, size) / torch.tensor(size[::-1])
        if float(ways.abs().mean()) < _CORNER:
            raise ValueError(f"its boxes lie around their cells in shares of the image: {_DECODED['yolox']}")
    if not (about.exporter or in_shares or how.layout in (*QUERIES, "rtdetr")):
        _check_extent(how, boxes, counted, size)
    if not about.exporter and how.layout in ("yolov8", "yolov5", "rtdetr", *QUERIES):
        columns = torch.cat(_columns(how, pictures))[..., :4]
        are_shares = in_shares or how.layout not in _CANDIDATES
        _check_centres(how, columns * torch.tensor([*size[::-1]] * 2) if are_shares else columns, size)
    if how.layout in (*QUERIES, "rtdetr"):
        if reach > _REACH * max(size):
            raise ValueError(
                f'the layout "{how.layout}" has boxes in 0 to 1, and they reach {reach / max(size):.3g}: divide '
                "them by the input's size in the network"
            )
    elif in_shares:
        if how.layout not in _CANDIDATES or how.takes not in ("boxes", "masks"):
            raise ValueError(
                f'the layout "{how.layout}" has boxes in pixels, and its boxes lie in 0 to 1: multiply them by the '
                "input's width and height in the network"
            )
        return replace(how, normalised=True), "its boxes are in 0 to 1, and are multiplied by the size of its input"
    if how.layout in (*_ROWS, "detr") and not about.exporter:
        _check_order(how, boxes, scores)
    return how, "" if about.exporter else note if bool(counted.any()) else NOTHING


def has_two_orders(about: Description, how: Interpretation) -> bool:
    """Return True for a layout with corners in pixels whose exporter nobody knows: it may begin with y."""
    return how.layout in _ROWS[:3] and not about.exporter


def check_axes(
    how: Interpretation,
    columns: Sequence[Sequence[Sequence[Tensor]]],
    rows: Sequence[Sequence[Sequence[Tensor]]],
    size: Size,
) -> None:
    """Check that boxes follow what is visible. `columns`: outputs for pictures of which only the left half is visible,
    and for their right halves; `rows`: for their upper and lower ones. Raises ValueError if they follow it along the
    other axis: their corners begin with y; or if many end before they begin, as sides in place of corners do.
    """
    found = [[_decoded(how, half, size)[:2] for half in halves] for halves in (columns, rows)]
    _check_order(how, *(torch.cat(each) for each in zip(*found[0], *found[1], strict=True)))
    way = torch.stack([_centre(size, *other) - _centre(size, *one) for one, other in found])
    along, across = abs(float(way[0, 0] + way[1, 1])), abs(float(way[0, 1] + way[1, 0]))
    if across > max(_MOVED, _ALONG * along):
        raise ValueError(
            f'the layout "{how.layout}" has corners x1, y1, x2, y2, and its boxes begin with y: let the network give '
            "boxes[..., [1, 0, 3, 2]]"
        )


def _check_order(how: Interpretation, boxes: Tensor, scores: Tensor) -> None:
    corners = boxes[_counted(scores)]
    turned = ((corners[:, 2:] - corners[:, :2]) < -_ROUNDING).any(1)
    if turned.float().sum() > _FEW * len(corners):
        raise ValueError(
            f'the layout "{how.layout}" has corners x1, y1, x2, y2, and boxes end before they begin: let the network '
            "give corners in this order"
        )


def _counted(scores: Tensor) -> Tensor:
    return (scores > 0) & (scores >= _COUNTS * scores.max()) if len(scores) else scores > 0


def _centre(size: Size, boxes: Tensor, scores: Tensor) -> Tensor:
    weights = torch.where(_counted(scores), scores, 0.0)[:, None]
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2 / torch.tensor(size[::-1])
    return (weights * centres).sum(0) / weights.sum().clamp(min=1e-9)


def _decoded(how: Interpretation, pictures: Sequence[Sequence[Tensor]], size: Size) -> list[Tensor]:
    how = replace(how, suppressed=False)  # Scores as they are, however large.
    found = [decoded(how, outputs, size)[: 3 + bool(how.extras)] for outputs in pictures]
    return [torch.cat([each.flatten(0, 1) for each in of_all]) for of_all in zip(*found, strict=True)]


def _with_boxes(how: Interpretation, pictures: Sequence[Sequence[Tensor]]) -> Interpretation:
    if how.logits < 0 or pictures[0][how.logits].shape[-1] != pictures[0][how.boxes].shape[-1]:
        return how
    if all(_is_inside(outputs[how.boxes]) for outputs in pictures):
        return how
    if all(_is_inside(outputs[how.logits]) for outputs in pictures):
        return replace(how, boxes=how.logits, logits=how.boxes)
    raise ValueError("it has two outputs [n, queries, 4], and neither has boxes in 0 to 1")


def _with_sigmoid(about: Description, how: Interpretation, pictures: Sequence[Sequence[Tensor]]) -> Interpretation:
    if about.scores != "sigmoid" or how.layout not in _CANDIDATES:
        raise ValueError(f'"scores": "{about.scores}" has no effect on a detector with the layout "{how.layout}"')
    columns = _columns(how, pictures)
    first, last = 4, (4 if how.layout == "yolov8" else 5) + how.classes
    return replace(how, each=not all(_is_inside(each[..., first:last]) for each in columns))


def _columns(how: Interpretation, pictures: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    found = [outputs[how.boxes] for outputs in pictures]
    return [each.mT for each in found] if how.layout == "yolov8" and not how.transposed else found


def _check_centres(how: Interpretation, boxes: Tensor, size: Size) -> None:
    """Raise ValueError for boxes [n, candidates, 4] that are not centre and sides, x before y."""
    wanted = f'the layout "{how.layout}" has boxes as centre x, centre y, width, height, and'
    sides = torch.tensor(size[::-1])
    beyond = ((boxes[..., :2] - sides / 2).abs() + boxes[..., 2:] / 2 > (0.5 + _ROUNDING) * sides).any(2).float().mean()
    are_corners = (boxes[..., 2:] > boxes[..., :2]).all(2).float().mean() >= _NEARLY_ALL
    if boxes.shape[1] >= _MANY and are_corners and beyond > 0.5:  # A few queries may all have found one large object.
        raise ValueError(f"{wanted} its boxes are corners x1, y1, x2, y2: let the network give centres and sides")
    places = (boxes[..., :2] / sides).mean(0).sort(0).values
    evenly = torch.linspace(0, 1, len(places))[:, None]
    if len(places) % _CELLS == 0 and bool(((places - evenly).abs().mean(0) > _UNEVEN).any()):
        raise ValueError(f"{wanted} its candidates have no centres all over the image: let the network give them first")
    if not how.strides:
        return
    cells = cells_of(how.strides, size, 3 if how.layout == "yolov5" else 1)
    offsets = (boxes[..., :2] - cells).mean((0, 1)) / boxes[..., 2:].mean((0, 1))
    if bool(((offsets + 0.5).abs() < _CORNER).all()):
        raise ValueError(f"{wanted} its boxes begin at their upper left corner: let the network give centres")
    centres = boxes[..., :2].mean(0)
    near, far = ((centres - each).abs().mean() for each in (cells, cells.flip(1)))
    if far < near / _ALONG:
        raise ValueError(f"{wanted} its boxes begin with y: let the network give them in this order")


def _check_extent(how: Interpretation, boxes: Tensor, counted: Tensor, size: Size) -> None:
    """Raise ValueError for boxes that are too large for a picture, or smaller than nothing, or all in one place."""
    sides = boxes[:, 2:] if how.takes == "turned" else boxes[:, 2:] - boxes[:, :2]
    most, of_cells = _HUGE * max(size), how.layout in _CANDIDATES  # Others may have their corners in another order.
    wrong = ~((sides >= (0 if of_cells else -most)) & (sides <= most)).all(1) & counted
    extent = float((boxes[:, :2].amax(0) - boxes[:, :2].amin(0)).max())
    if wrong.sum() > _FEW * counted.sum() or (how.layout in _DECODED and extent < _HEAP * min(size)):
        seen = f"sides of {float(sides.min()):.3g} to {float(sides.max()):.3g}, and begin within {extent:.3g} pixels"
        remedy = _DECODED.get(how.layout, "let the network give pixels of its input")
        raise ValueError(f'the boxes of layout "{how.layout}" have {seen}: {remedy}')


def _is_inside(values: Tensor) -> bool:
    return bool(((values >= -_ROUNDING) & (values <= 1 + _ROUNDING)).all())


def _are_whole(values: Tensor) -> bool:
    return bool(((values - values.round()).abs() <= _ROUNDING).all())


def _check_scores(how: Interpretation, scores: Tensor) -> None:
    least, most = float(scores.min()), float(scores.max())
    if most <= 1 + _ROUNDING and (least >= -_ROUNDING or how.layout in _ROWS):
        return
    remedy = "let the network give its columns in the layout's order, and scores in 0 to 1"
    if how.layout in _CANDIDATES:
        remedy = 'state "scores": "sigmoid" where the network leaves its sigmoid out'
    raise ValueError(f'its scores in the layout "{how.layout}" are {least:.3g} to {most:.3g}: {remedy}')


def _classes(how: Interpretation, pictures: Sequence[Sequence[Tensor]]) -> Tensor:
    place = {"end2end": -1, "mmdeploy": 1 - how.boxes, "torchvision": 2, "detr": 0}.get(how.layout)
    rows = [outputs[how.boxes][..., 5] if place is None else outputs[place] for outputs in pictures]
    return torch.cat([each.flatten() for each in rows])


def _check_classes(
    about: Description, how: Interpretation, pictures: Sequence[Sequence[Tensor]], counted: Tensor
) -> str:
    """Return a note on the classes' numbers. Raises ValueError for those that are none."""
    if how.logits >= 0:
        return ""
    numbers = _classes(how, pictures)
    # Where no box has a score, these may be the scores, and whole numbers of one class the classes.
    if len(numbers) == len(counted) and (bool(counted.any()) or _are_whole(numbers)):
        numbers = numbers[counted]
    if not len(numbers):
        return ""
    least, most, labels = float(numbers.min()), float(numbers.max()), len(about.labels or ())
    if not _are_whole(numbers) or least < -_ROUNDING:
        raise ValueError(
            f'the classes of layout "{how.layout}" are {least:.3g} to {most:.3g}, no whole numbers: let the network '
            "give its columns in the layout's order"
        )
    if labels and most > labels - 1 + _ROUNDING:
        raise ValueError(f"it finds class {most:.0f}, and its {labels} labels have the numbers 0 to {labels - 1}")
    if how.layout == "torchvision" and least < 1 - _ROUNDING:
        raise ValueError("it finds class 0, which is the background of torchvision's detectors: let it add 1 to all")
    return FROM_1 if how.layout in _ROWS[:3] and least > _ROUNDING else ""
