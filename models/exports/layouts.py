"""Meaning of exported networks' outputs, and their conversion to boxes, scores and classes on the device.

    outputs of the file ─► Interpretation, by their shapes ─► boxes [n, a, 4], scores [n, a], classes [n, a], extras

Owns: the layouts (docs/which-file.md has the table) and telling them apart by shapes. Must not know files, and of tasks
only the form of outputs that they take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from models.contract.model import Array
from models.contract.resize import ResizeHow
from models.contract.task_adapter import Takes, task_class
from models.exports.metadata import TASKS, Description, Scores

SIZES: Mapping[str, Array] = MappingProxyType({"orig_target_sizes": np.ones((1, 2), np.int64)})
"""Factor that RT-DETR's own exports and D-FINE's multiply boxes by; with ones the boxes are in 0 to 1."""
DETR_OUTPUTS = ("labels", "boxes", "scores")
QUERIES = ("detr", "rfdetr", "deformable", "softmax")
"""Layouts of networks that take any size of input."""

_STRIDES: tuple[tuple[int, ...], ...] = ((8, 16, 32), (4, 8, 16, 32), (8, 16, 32, 64), (16, 32))
_ROWS = (100, 300, 1000)
MOST_DETECTIONS = 300
"""Most boxes in an answer of torchvision's detectors: at least as many as its own networks give (100 to 300)."""
_LEAST_PROBABILITY = 1e-12
_LEAST_TOTAL, _ROUNDED = 10.0, 0.05
_SCALES, _LEAST_USUAL = (100, 255), 5.0
_WHOLE = 1e-3  # Error of a sum of a thousand probabilities rounded to float16.
_MOST_PAIRS = 100  # transformers: DeformableDetrImageProcessor.post_process_object_detection

PROBABILITIES = "its outputs are probabilities, and are answered as they are"
_SOFTMAX = 'its outputs are not those of a last layer, and a softmax makes scores of them: else state "scores"'

Shapes = Sequence[Sequence[int]]
Size = tuple[int, int]


@dataclass(frozen=True)
class Interpretation:
    """Reading of a network's outputs. `takes`: the form for the task; `classes`: their number; `extras`: columns beside
    box, score and classes; `suppressed`: whether the network has done its own suppression.

    `probabilities`: of classes, whether the network has done its softmax or its sigmoid; `each`: whether it is a
    sigmoid, so that every class has a score of its own, which for a detector is still to be done; `two_of_one`: whether
    it has one score for two labels, that of the second. `last`: whether the first output is a map with its channels
    last, as of TensorFlow; `class_map`: whether it, [n, 1, h, w], has numbers of classes; `normalised`: whether boxes
    in pixels by their layout are in shares of the input's size.

    `boxes`, `prototypes`, `logits`: positions of these outputs, -1 for none. `transposed`: YOLOv8's candidates are rows
    and not columns.
    """

    takes: Takes
    layout: str
    classes: int
    extras: int = 0
    suppressed: bool = False
    boxes: int = 0
    prototypes: int = -1
    strides: tuple[int, ...] = ()
    transposed: bool = False
    probabilities: bool = False
    each: bool = False
    two_of_one: bool = False
    class_map: bool = False
    last: bool = False
    logits: int = -1
    normalised: bool = False


@dataclass(frozen=True)
class _Layout:
    """Functions of a layout. `read`: raises ValueError, naming the missing fact; `decode`: boxes, scores, classes and
    extras, which may be empty; `resize`: the geometry of images if the owner states none.

    For candidates in columns: `before`: columns before those of the classes, a box and perhaps a score of any object;
    `a_cell`: candidates of a cell of the image, 0 if they are not of cells.
    """

    read: Callable[[Description, Shapes, Size, str], Interpretation]
    decode: Callable[[Interpretation, Sequence[Tensor], Size], tuple[Tensor, Tensor, Tensor, Tensor | None]]
    resize: ResizeHow = "letterbox"
    before: int = 4
    a_cell: int = 0


def interpret(about: Description, shapes: Shapes, size: Size) -> Interpretation:
    """Interpret outputs of these shapes (of one image, the batch first). Raises ValueError, naming the missing fact."""
    seen = ", ".join(str(list(shape)) for shape in shapes)
    if about.takes == "outputs":
        return Interpretation("outputs", "raw", 0)
    if about.takes == "classes":
        return _read_classes(about, shapes, seen)
    stated = about.layout or _suppressed(about, shapes)
    read = LAYOUTS[stated].read if stated in LAYOUTS else _read
    return read(about, shapes, size, seen)


def resize_of(about: Description, how: Interpretation) -> ResizeHow:
    """Return the geometry of images in the network's input, if its owner states none."""
    if about.resize is None and about.takes == "outputs" and about.task in TASKS:
        return task_class(about.task).resize
    if about.resize is None and about.takes == "classes":
        return "centre"
    return about.resize or (LAYOUTS[how.layout].resize if how.layout in LAYOUTS else "letterbox")


def decoded(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, ...]:
    """Convert float32 outputs of the file to the form that the task takes (models.contract.task_adapter.Takes)."""
    if how.takes == "outputs":
        found = [each.movedim(3, 1) if how.last and each.ndim == 4 else each for each in outputs]
        found[0] = found[0].squeeze(1) if how.class_map else found[0]
        return tuple(each.contiguous() for each in found)
    if how.takes == "classes":
        given = outputs[0].flatten(1)  # Softmax or sigmoid, done by the task, are to give the network's scores.
        if how.probabilities:
            log = given.clamp_min(_LEAST_PROBABILITY).log()
            given = log - (1 - given).clamp_min(_LEAST_PROBABILITY).log() if how.each or how.two_of_one else log
        return (torch.cat((torch.zeros_like(given), given), dim=1) if how.two_of_one else given,)
    boxes, scores, classes, extras = LAYOUTS[how.layout].decode(how, outputs, size)
    if how.suppressed:  # What the trial may not have seen fails its image, as NaN does: no score, no label's class.
        beyond = (classes >= (how.classes or 1 << 30)) | (classes < int(how.layout == "torchvision"))
        beyond &= scores > 0.05  # Rows may be filled up with anything.
        scores = scores.masked_fill((scores > 1.01) | beyond, torch.inf)  # 8 bits round.
    found = [boxes.contiguous(), scores.contiguous(), classes.to(torch.int32)]
    if how.extras and extras is not None:
        found.append(extras.contiguous())
    if how.takes == "masks":
        found.append(outputs[how.prototypes])
    return tuple(found)


def _read_classes(about: Description, shapes: Shapes, seen: str) -> Interpretation:
    lengths = [max(shape[1:]) for shape in shapes if len(shape) > 1 and sum(each != 1 for each in shape[1:]) <= 1]
    if len(shapes) != 1 or not lengths:
        raise ValueError(f"a classifier has one output [n, classes], not {seen}: export it with its scores alone")
    [count], given = lengths, about.scores == "probabilities"
    if count == 1 and about.labels and len(about.labels) == 2:
        return Interpretation("classes", "classes", 2, probabilities=given, two_of_one=True)
    _check_count(count, len(about.labels) if about.labels else None, seen)
    each = count == 1 or about.scores == "sigmoid"
    return Interpretation("classes", "classes", count, probabilities=given, each=each)


def is_inside(values: Tensor) -> bool:
    """Return True if all are in 0 to 1, but for their last digits."""
    return bool(((values >= 0) & (values <= 1 + 1e-5)).all())


def scored(
    how: Interpretation, stated: Scores | None, outputs: Tensor, *, is_layer: bool = False
) -> tuple[Interpretation, str]:
    """Find how scores are read, by a network's `outputs`, [n, classes], for images, real and far from real ones; return
    that and a note to its owner. `stated`: the statement of its owner or its exporter; `is_layer`: nothing bounds them.

    Numbers of all images that are never outside 0 to 1 are no logits: logits leave that range when the input is
    multiplied. No more are those that have one sum for all images, such as 100: they are divided by it.

    Raises ValueError if the stated form is impossible.
    """
    inside = is_inside(outputs)
    alone = how.each or how.two_of_one
    whole = not alone and bool(((outputs.sum(1) - 1).abs() <= _WHOLE).all())
    total = float(outputs.sum(1).mean())
    is_whole = bool((outputs == outputs.round()).all())  # Each was rounded, by half at most.
    off = total * (_WHOLE if not is_whole else min(_ROUNDED, outputs.shape[1] / 2 / max(total, 1)))
    of_total = bool(((outputs >= 0).all(1) & ((outputs.sum(1) - total).abs() <= off)).all())
    if of_total and total > _LEAST_TOTAL and not alone and not is_layer and stated != "logits":
        return replace(how, probabilities=True), f"its outputs have one sum, {total:.4g}: answered as shares of it"
    if stated != "logits" and not is_layer:
        _check_scale(outputs)
    if stated == "probabilities" and not inside:
        least, most = float(outputs.min()), float(outputs.max())
        raise ValueError(f'its scores are {least:.3g} to {most:.3g}, which are no "probabilities": state "logits"')
    if stated == "logits" or not inside or (is_layer and not whole and stated != "probabilities"):
        if whole and inside:
            return how, "its outputs are probabilities, and softmax is done once more, as its sidecar says"
        return how, "" if stated or alone or is_layer else _SOFTMAX
    if how.two_of_one or whole:
        return replace(how, probabilities=True), "" if stated else PROBABILITIES
    note = "each of its outputs is a probability of its own (a sigmoid's), and is answered as it is"
    return replace(how, probabilities=True, each=True), "" if stated else note


def mapped(
    how: Interpretation, about: Description, seen: Tensor, axes: int, *, integers: bool, is_layer: bool
) -> tuple[Interpretation, str]:
    """Find how a map [n, h, w] or [n, 1, h, w] is read, by its numbers `seen` for images; return that and a note.

    `integers`: whether they are of such a type; `is_layer`: nothing bounds them. Raises ValueError.
    """
    most, count = float(seen.max()), len(about.labels or ())
    is_whole, of_classes = bool((seen == seen.round()).all() and seen.min() >= 0), axes == 3 or integers
    if of_classes and not is_whole:
        raise ValueError("its map [n, h, w] has fractions or numbers below 0: let the network give scores [n, 1, h, w]")
    if of_classes or (is_whole and not is_layer and (most > 1 or count > 2)):
        if most >= count > 0:
            raise ValueError(f"its map has class {most:.0f}, and {count} labels: state one for each number from 0 on")
        return replace(how, class_map=axes == 4), ""
    if is_layer or about.scores or not is_inside(seen):
        return how, ""
    if is_whole and not count:
        raise ValueError("its map has 0 and 1 alone, as a mask or as numbers of classes: state labels, two for a mask")
    return replace(how, probabilities=True), PROBABILITIES


def _check_scale(seen: Tensor) -> None:
    """Raise ValueError for numbers within 0 to 100 or 255: logits of this size leave it for a multiplied input."""
    least, most, usual = float(seen.min()), float(seen.max()), float(seen.amax(1).median())
    scale = next((each for each in _SCALES if most <= each * (1 + _WHOLE)), 0)
    if least >= 0 and usual > _LEAST_USUAL and scale:
        raise ValueError(
            f"its scores are {least:.3g} to {most:.3g}, as a sigmoid's times {scale}: divide them by {scale} in the "
            'network, or state "scores": "logits"'
        )


def _read_torchvision(about: Description, shapes: Shapes, size: Size, seen: str) -> Interpretation:
    if about.takes != "boxes" or [len(shape) for shape in shapes] != [2, 1, 1] or shapes[0][1] != 4:
        raise ValueError(f"torchvision's detectors are for detect, with outputs [k, 4], [k], [k]; this one: {seen}")
    return Interpretation("boxes", "torchvision", len(about.labels or ()), 0, True)


def _suppressed(about: Description, shapes: Shapes) -> str:
    """Return the layout of a detector with its own suppression, by its outputs in any order; "" for others."""
    lengths = sorted((tuple(shape[1:]) for shape in shapes), key=lambda each: (-len(each), each != (1,)))
    if about.takes != "boxes" or not lengths or len(lengths[0]) != 2:
        return ""
    (rows, columns), others = lengths[0], lengths[1:]
    if columns == 5 and others == [(rows,)]:
        return "mmdeploy"
    return "end2end" if columns == 4 and others in ([(1,), (rows,), (rows,)], [(rows,), (rows,)]) else ""


def _read_suppressed(about: Description, shapes: Shapes, size: Size, seen: str) -> Interpretation:
    """Read boxes, scores and classes: mmdeploy has two outputs, others one for each, YOLOv7 their number in front."""
    found = _suppressed(about, shapes)
    if found == "" or found != (about.layout or found):
        raise ValueError(f"not [n, k, 5] and [n, k] (mmdeploy), nor [n, k, 4], [n, k] and [n, k] (end2end): {seen}")
    boxes = next(place for place, shape in enumerate(shapes) if len(shape) == 3)
    rows = shapes[boxes][1]
    if found == "end2end" and [list(shape[1:]) for shape in shapes[-3:]] != [[rows, 4], [rows], [rows]]:
        raise ValueError(f"its outputs have to come as boxes, scores, classes, their number first, if at all: {seen}")
    return Interpretation("boxes", found, len(about.labels or ()), 0, True, boxes)


def _read_detr(about: Description, shapes: Shapes, size: Size, seen: str) -> Interpretation:
    lengths = [list(shape[1:]) for shape in shapes]
    if about.takes != "boxes" or len(lengths) != 3 or [lengths[0], [*lengths[0], 4], lengths[0]] != lengths:
        raise ValueError(f"RT-DETR has outputs [n, queries], [n, queries, 4] and [n, queries], not {seen}")
    return Interpretation("boxes", "detr", len(about.labels or ()), 0, True, 1)


def _read_queries(about: Description, shapes: Shapes, size: Size, seen: str) -> Interpretation:
    threes = [index for index, shape in enumerate(shapes) if len(shape) == 3][:2]
    fours = [index for index, shape in enumerate(shapes) if len(shape) == 4] if about.takes == "masks" else [-1]
    of_queries = {shapes[index][1] for index in (*threes, *fours) if index >= 0}
    if about.takes not in ("boxes", "masks") or (len(threes), len(fours), len(of_queries)) != (2, 1, 1):
        masks = "" if about.takes == "boxes" else " and [n, queries, h, w]"
        raise ValueError(f"a DETR has outputs [n, queries, 4], [n, queries, classes]{masks}, not {seen}")
    are_boxes = [shapes[index][2] == 4 for index in threes]
    is_second = are_boxes == [False, True] or (all(are_boxes) and about.boxes_second)
    logits, boxes = threes if is_second else threes[::-1]
    slots = shapes[logits][2]
    count = len(about.labels) if about.labels else slots
    if shapes[boxes][2] != 4 or not 1 <= count <= slots <= count + 1:
        raise ValueError(f"its outputs are of {slots} classes, and there are {count} labels: {seen}")
    extras = shapes[boxes][1] if about.takes == "masks" else 0
    return Interpretation(about.takes, about.layout or "rfdetr", count, extras, True, boxes, fours[0], logits=logits)


def _read(about: Description, shapes: Shapes, size: Size, seen: str) -> Interpretation:
    boxes, prototypes = _outputs(about, shapes, seen)
    _, first, second = shapes[boxes]
    if any(max(first, second) in shape[1:] for n, shape in enumerate(shapes) if n not in (boxes, prototypes)):
        raise ValueError(
            f"it has boxes and scores, or two forms of them, in outputs of their own, {seen}: let the network give one "
            "output, torch.cat((centres, sides, scores), 2)"
        )
    extras = _extras(about, shapes[prototypes], seen)
    count = len(about.labels) if about.labels else None
    anchors = {sum((size[0] // s) * (size[1] // s) for s in strides): strides for strides in _STRIDES}
    name = about.layout or _layout(about, (first, second), extras, anchors)
    if name not in LAYOUTS:
        raise ValueError(
            f'the layout of its outputs is not known ({seen}): state it in its sidecar, "layout": one of '
            f"{', '.join(LAYOUTS)}; or let the network give one of these"
        )
    if name == "rows" or (name == "rtdetr" and second == 6 + extras):
        if second != 6 + extras:
            raise ValueError(f"its rows have {second} columns, and {6 + extras} are expected; its outputs are {seen}")
        # Neither wants suppression: RT-DETR's rows are its queries, which name their class.
        classes = 0 if name == "rtdetr" else count or 0
        return Interpretation(about.takes, name, classes, extras, True, boxes, prototypes)
    layout = LAYOUTS[name]
    cells = {layout.a_cell * number: strides for number, strides in anchors.items()} if layout.a_cell else {}
    transposed = name == "yolov8" and first in cells and second not in cells
    columns, places = (first, second) if name == "yolov8" and not transposed else (second, first)
    found = columns - layout.before - extras
    _check_count(found, count, seen)
    if name == "yolox" and places not in cells:
        raise ValueError(f"YOLOX at {size[0]} x {size[1]} has other anchors than {first}; its outputs are {seen}")
    suppressed, strides = name == "rtdetr", cells.get(places, ())
    if suppressed and places > max(_ROWS) and (places in anchors or places / 3 in anchors):
        raise ValueError(f'its {places} candidates are one or three a cell: state "layout": "yolov8" or "yolov5"')
    return Interpretation(about.takes, name, found, extras, suppressed, boxes, prototypes, strides, transposed)


def _outputs(about: Description, shapes: Shapes, seen: str) -> tuple[int, int]:
    threes = [index for index, shape in enumerate(shapes) if len(shape) == 3]
    fours = [index for index, shape in enumerate(shapes) if len(shape) == 4]
    if about.takes == "masks":
        if len(threes) != 1 or len(fours) != 1:
            raise ValueError(f"a network of masks has outputs [n, columns, anchors] and [n, m, h, w], not {seen}")
        return threes[0], fours[0]
    if not threes:
        line = ": of one image let it give boxes[None], scores[None], labels[None]" if len(shapes) == 3 else ""
        raise ValueError(f"a detector has an output [n, columns, anchors] or [n, rows, columns], not {seen}{line}")
    return threes[0], -1


def _extras(about: Description, prototypes: Sequence[int], seen: str) -> int:
    """Return the count of each candidate's numbers beside box and classes."""
    if about.takes == "keypoints" and about.keypoints is None:
        raise ValueError(f'a network of poses needs "keypoints": [17, 3] in its sidecar; its outputs are {seen}')
    if about.takes == "masks":
        return prototypes[1]
    return prod(about.keypoints or ()) if about.takes == "keypoints" else int(about.takes == "turned")


def _layout(about: Description, shape: tuple[int, int], extras: int, anchors: Mapping[int, tuple[int, ...]]) -> str:
    first, second = shape
    if about.labels:
        columns = 4 + len(about.labels) + extras
        is_column = second != 6 + extras or (second in anchors and first != 6 + extras)
        if (first == columns and is_column) or (second == columns and first in anchors):
            return "yolov8"
        if second == columns + 1 and first in {3 * number for number in anchors}:
            return "yolov5"
    if second == 6 + extras and (first in _ROWS or about.end_to_end):
        return "rows"
    if second in anchors and first > 4 + extras:
        return "yolov8"
    if first in {3 * number for number in anchors} and second > 5 + extras:
        return "yolov5"
    return ""


def _check_count(found: int, stated: int | None, seen: str) -> None:
    if found < 1:
        raise ValueError(f"its outputs leave no room for classes: {seen}")
    if stated is not None and found != stated:
        raise ValueError(f"its outputs are of {found} classes, and there are {stated} labels: {seen}")


def _rows(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raw = outputs[how.boxes]
    return raw[..., :4], raw[..., 4], raw[..., 5].round(), raw[..., 6:]


def _rtdetr(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    boxes, scores, classes, extras = (_columns if how.classes else _rows)(how, outputs, size)
    return _corners(_stretched(boxes, size)), scores, classes, extras


def _columns(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raw = outputs[how.boxes]
    if how.layout == "yolov8" and not how.transposed:
        raw = raw.transpose(1, 2)
    first = LAYOUTS[how.layout].before
    scores, classes = raw[..., first : first + how.classes].max(dim=2)
    of_any = raw[..., 4] if first == 5 else None
    if how.each:
        scores, of_any = scores.sigmoid(), None if of_any is None else of_any.sigmoid()
    return raw[..., :4], scores if of_any is None else scores * of_any, classes, raw[..., first + how.classes :]


def _centred(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    boxes, scores, classes, extras = _columns(how, outputs, size)
    if how.normalised:
        boxes = _stretched(boxes, size)
    if how.layout == "yolox":
        boxes = _yolox(boxes, how.strides, size)
    return boxes if how.takes == "turned" else _corners(boxes), scores, classes, extras


def _detr(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, None]:
    labels, boxes, scores = outputs
    return _stretched(boxes, size), scores, labels, None


def _rfdetr(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the best pairs of a query and a class, each with a coefficient of 1 for its query's mask."""
    raw = outputs[how.boxes]
    probabilities = outputs[how.logits][..., : how.classes].sigmoid()
    pairs = probabilities.flatten(1)
    most = _MOST_PAIRS if how.layout == "deformable" else raw.shape[1]
    scores, places = pairs.topk(min(pairs.shape[1], most), dim=1)
    queries = (places // how.classes).unsqueeze(2)
    boxes = _corners(_stretched(raw.gather(1, queries.expand(-1, -1, 4)), size))
    own = (queries == torch.arange(how.extras, device=raw.device)).float() if how.extras else None
    return boxes, scores, places % how.classes, own


def _softmax(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, None]:
    """Return the best class of each query, by descending score; the last slot means no object."""
    scores, classes = outputs[how.logits].softmax(2)[..., :-1].max(2)
    scores, places = scores.sort(dim=1, descending=True, stable=True)
    boxes = outputs[how.boxes].gather(1, places.unsqueeze(2).expand(-1, -1, 4))
    return _corners(_stretched(boxes, size)), scores, classes.gather(1, places), None


def _mmdeploy(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, None]:
    found, classes = outputs[how.boxes], outputs[1 - how.boxes]
    return found[..., :4], found[..., 4], classes, None


def _end2end(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, None]:
    """Return the boxes; those beyond the number, if it is stated, have score 0."""
    boxes, scores, classes = outputs[-3:]
    if len(outputs) == 3:
        return boxes, scores, classes, None
    there = torch.arange(scores.shape[1], device=scores.device) < outputs[0]
    return boxes, torch.where(there, scores, torch.zeros_like(scores)), classes, None


def _torchvision(how: Interpretation, outputs: Sequence[Tensor], size: Size) -> tuple[Tensor, Tensor, Tensor, None]:
    """Return the best `MOST_DETECTIONS` of all boxes of an image, filled up with boxes of score 0."""
    boxes, scores, given = outputs
    # These are numbers of the host if the file fixes them.
    labels = torch.as_tensor(given, dtype=torch.int64, device=boxes.device)
    scores, places = torch.cat((scores, scores.new_zeros(MOST_DETECTIONS))).sort(descending=True, stable=True)
    places = places[:MOST_DETECTIONS]
    boxes = torch.cat((boxes, boxes.new_zeros((MOST_DETECTIONS, 4))))[places]
    labels = torch.cat((labels, labels.new_zeros(MOST_DETECTIONS)))[places]
    return boxes[None], scores[None, :MOST_DETECTIONS], labels[None], None


def _corners(centred: Tensor) -> Tensor:
    half = centred[..., 2:] / 2
    return torch.cat((centred[..., :2] - half, centred[..., :2] + half), dim=2)


def _stretched(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    return boxes * torch.tensor([*size[::-1]] * 2, dtype=boxes.dtype, device=boxes.device)


def cells_of(strides: Sequence[int], size: tuple[int, int], repeated: int = 1) -> Tensor:
    """Return the middles of the image's cells, [cells, 2]: those of a stride row by row, as often as `repeated`."""
    grids = []
    for stride in strides:
        rows, columns = size[0] // stride, size[1] // stride
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        grids.append((torch.stack((x, y), dim=2).reshape(-1, 2).repeat(repeated, 1) + 0.5) * stride)
    return torch.cat(grids)


def _yolox(raw: Tensor, strides: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    steps = [torch.full(((size[0] // stride) * (size[1] // stride), 1), stride) for stride in strides]
    corners, step = (cells_of(strides, size) - torch.cat(steps) / 2).to(raw), torch.cat(steps).to(raw)
    return torch.cat((raw[..., :2] * step + corners, raw[..., 2:].exp() * step), dim=2)


LAYOUTS: Mapping[str, _Layout] = {
    "yolov8": _Layout(_read, _centred, a_cell=1),
    "yolov5": _Layout(_read, _centred, before=5, a_cell=3),
    "yolox": _Layout(_read, _centred, "top-left", before=5, a_cell=1),
    "rows": _Layout(_read, _rows),
    "rtdetr": _Layout(_read, _rtdetr, "stretch"),
    "detr": _Layout(_read_detr, _detr, "stretch"),
    **dict.fromkeys(("rfdetr", "deformable"), _Layout(_read_queries, _rfdetr, "stretch")),
    "softmax": _Layout(_read_queries, _softmax, "stretch"),
    "torchvision": _Layout(_read_torchvision, _torchvision),
    "mmdeploy": _Layout(_read_suppressed, _mmdeploy, "top-left"),
    "end2end": _Layout(_read_suppressed, _end2end),
}
