"""What the inputs and outputs of exported networks are: forms, layouts, numbers that a layout cannot have."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from models.contract.resize import Whole, grey
from models.contract.task_adapter import AdaptedFile, task_class
from models.exports import image_trial
from models.exports.answers import Entry, Export, entry_of
from models.exports.exported import _image_model
from models.exports.images import ExportedImages
from models.exports.layouts import MOST_DETECTIONS, Interpretation, cells_of, decoded, interpret, resize_of
from models.exports.metadata import Description
from models.exports.objects import FROM_1, NOTHING, check_axes, has_two_orders, located
from models.onnx.file import Value
from tests.support.exports_of_networks import written

SIDE = 160
FOUND = [
    ((10, 20, 50, 60), 0, 0.9),
    ((70, 15, 150, 75), 1, 0.8),
    ((20, 90, 60, 150), 2, 0.7),
    ((90, 9, 140, 55), 0, 0.6),
]
LABELS = ("one", "two", "three")
COUNTED = torch.tensor([[4.0]])


def centred(box: tuple[int, ...], by: float = 1.0) -> list[float]:
    left, top, right, bottom = (each / by for each in box)
    return [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]


def columns(by: float = 1.0, *, logits: bool = False, objectness: bool = False) -> Tensor:
    """Return [1, candidates, columns] with the objects at the first places."""
    raw = torch.full((1, 1575 if objectness else 525, 7 + objectness), 1e-3)
    raw[..., :2], raw[..., 2:4] = cells_of((8, 16, 32), (SIDE, SIDE), 1 + 2 * objectness) / by, 5 / by
    for place, (box, number, score) in enumerate(FOUND):
        raw[0, place, :4] = torch.tensor(centred(box, by))
        raw[0, place, 4:5] = 1.0 - 1e-3
        raw[0, place, 4 + objectness :] = 1e-3
        raw[0, place, 4 + objectness + number] = score
    raw[..., 4:] = raw[..., 4:].logit() if logits else raw[..., 4:]
    return raw if objectness else raw.mT.contiguous()


def rows(row: Any = lambda box, number, score: [*box, score, number], by: float = 1.0) -> Tensor:
    """Return [1, 100, 6] with the objects in front, and zeros."""
    raw = torch.zeros((1, 100, 6))
    raw[0, : len(FOUND)] = torch.tensor(
        [row([each / by for each in box], number, score) for box, number, score in FOUND]
    )
    return raw


def counted() -> list[Tensor]:
    found = rows()
    return [COUNTED, found[..., :4], found[..., 4], found[..., 5]]


CENTRES = cells_of((8, 16, 32), (SIDE, SIDE))
SIDES = 10 + 40 * torch.rand((525, 2), generator=torch.Generator().manual_seed(0))


def grid(boxes: Tensor) -> Tensor:
    """Return candidates of three classes around all cells."""
    return torch.cat((boxes, torch.rand((525, 3), generator=torch.Generator().manual_seed(1))), 1).T[None]


def queries(slots: int = 4) -> tuple[Tensor, Tensor]:
    logits, boxes = torch.full((1, 30, slots), -6.0), torch.full((1, 30, 4), 0.5)
    for place, (box, number, score) in enumerate(FOUND):
        logits[0, place, number] = math.log(score / (1 - score))
        boxes[0, place] = torch.tensor(centred(box, SIDE))
    return logits, boxes


def read(outputs: list[Tensor], task: str = "detect", **stated: Any) -> tuple[list[tuple[list[int], int, float]], str]:
    """Return the objects that are read, best first, and the note."""
    takes = {"detect": "boxes", "obb": "turned"}[task]
    about = Description(task=task, takes=takes, **{"labels": LABELS, **stated})  # type: ignore[arg-type]
    how = interpret(about, [list(each.shape) for each in outputs], (SIDE, SIDE))
    how, note = located(about, how, [outputs, outputs], (SIDE, SIDE))
    boxes, scores, classes, *_ = decoded(how, outputs, (SIDE, SIDE))
    best = [place for place in scores[0].argsort(descending=True).tolist() if float(scores[0, place]) > 0.3]
    return [
        ([round(each) for each in boxes[0, place].tolist()], int(classes[0, place]), round(float(scores[0, place]), 2))
        for place in best
    ], note


IN_SHARES = "its boxes are in 0 to 1, and are multiplied by the size of its input"


@pytest.mark.parametrize(
    ("outputs", "stated", "note"),
    [
        ([columns()], {}, ""),
        ([columns(SIDE)], {}, IN_SHARES),
        ([columns(SIDE).mT.contiguous()], {}, IN_SHARES),
        ([columns(logits=True)], {"scores": "sigmoid"}, ""),
        ([columns(objectness=True)], {}, ""),
        ([rows()], {}, ""),
        (counted(), {}, ""),
        (counted()[1:], {}, ""),
        ([rows()[..., 5], rows()[..., :5]], {}, ""),
        ([*queries()], {"layout": "rfdetr"}, ""),
        ([*queries()[::-1]], {"layout": "rfdetr"}, ""),
        ([rows(lambda box, number, score: [*centred(box, SIDE), score, number])], {"layout": "rtdetr"}, ""),
    ],
)
def test_the_same_objects_are_read(outputs: list[Tensor], stated: dict[str, Any], note: str) -> None:
    assert read(outputs, **stated) == ([(list(box), number, score) for box, number, score in FOUND], note)


@pytest.mark.parametrize(
    ("outputs", "stated", "said"),
    [
        ([columns(logits=True)], {}, 'state "scores": "sigmoid"'),
        ([columns()], {"scores": "logits"}, '"scores": "logits" has no effect on a detector'),
        ([rows()], {"scores": "sigmoid"}, 'no effect on a detector with the layout "rows"'),
        ([rows(by=SIDE)], {}, "its boxes lie in 0 to 1"),
        ([rows(lambda box, number, score: [number, score, *box])], {}, "its scores .* are 0 to 150"),
        ([rows(lambda box, number, score: [*box, number, score])], {}, "its scores .* are 0 to 2"),
        ([rows(lambda box, number, score: [*box, 0, score])], {}, "no whole numbers"),
        ([rows(lambda box, number, score: [*centred(box), score, number])], {}, "end before they begin"),
        ([rows(lambda box, number, score: [*box, score, number + 1])], {}, "class 3, and its 3 labels"),
        ([counted()[place] for place in (0, 1, 3, 2)], {}, "its scores .* are 0 to 2"),
        (counted()[:0:-1], {}, "have to come as boxes, scores, classes"),
        ([*counted()[1:], COUNTED], {}, "have to come as boxes, scores, classes, their number first"),
        (
            [rows(lambda box, number, score: [*centred(box), score, number])],
            {"layout": "rtdetr"},
            "has boxes in 0 to 1",
        ),
        ([queries()[0], queries()[0]], {"layout": "rfdetr"}, "neither has boxes"),
        ([grid(torch.cat((CENTRES - SIDES / 2, CENTRES + SIDES / 2), 1))], {}, "are corners"),
        ([grid(torch.cat((CENTRES, SIDES - 25), 1))], {}, '"yolov8" have sides of -15 to 25'),
        ([columns(objectness=True)[:, :525]], {"layout": "yolox"}, 'if it decodes .* "layout": "yolov5"'),
        ([columns(SIDE, objectness=True)[:, :525]], {"layout": "yolox"}, 'around their cells .* "layout": "yolov5"'),
        ([columns(SIDE, objectness=True)], {"layout": "rtdetr", "labels": list("abcd")}, "three a cell"),
        ([columns(20, objectness=True)], {}, 'does not decode .* state "layout": "yolox"'),
        ([rows(by=1e-37)], {}, '"rows" have sides of .* let the network'),
        ([grid(torch.cat((CENTRES - SIDES / 2, SIDES), 1))], {}, "begin at their upper left"),
        ([grid(torch.cat((CENTRES.flip(1), SIDES), 1))], {}, "begin with y"),
        (
            [queries(3)[0], torch.cat((CENTRES - SIDES / 2, CENTRES + SIDES / 2), 1)[None, 100:130] / SIDE],
            {"layout": "rfdetr"},
            "are corners",
        ),
        ([queries(3)[1], queries(3)[0].sigmoid()], {"layout": "rfdetr"}, "has logits, and its scores are in 0 to 1"),
        (
            [columns()[:, 4:], columns()[:, :4]],
            {"labels": None, "layout": "rtdetr"},
            "scores, .* in outputs of their own",
        ),
        ([columns(SIDE).roll(3, 1)], {}, "no centres all over the image"),
        (
            [rows()[0, :, :4], rows()[0, :, 4], rows()[0, :, 5]],
            {"layout": "torchvision"},
            "finds class 0, .* background",
        ),
        (
            [queries()[0].roll(1, 2) + torch.tensor([9.0, 0, 0, 0]), queries()[1]],
            {"layout": "softmax"},
            "find the first",
        ),
    ],
)
def test_numbers_that_the_layout_cannot_have_are_refused(
    outputs: list[Tensor], stated: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read(outputs, **stated)


def test_classes_of_which_none_is_the_first_are_said_to_begin_with_1_perhaps() -> None:
    found = [rows(lambda box, number, score: [*box, score, number + 1])]
    assert read(found, labels=(*LABELS, "four"))[1] == FROM_1
    beyond = decoded(Interpretation("boxes", "rows", 3, 0, True), found, (SIDE, SIDE))[1]
    assert beyond[0].isinf().nonzero().flatten().tolist() == [2]  # Its image fails: the labels are of others.


@pytest.mark.parametrize("form", ["rows", "mmdeploy", "end2end"])
def test_boxes_that_follow_what_is_visible_along_the_other_axis_begin_with_y(form: str) -> None:
    def outputs(order: list[int], axis: int, least: int, most: int) -> list[Tensor]:
        """Return the objects whose middle lies there, in another order of numbers."""
        found = rows()
        middles = (found[0, :, axis] + found[0, :, axis + 2]) / 2
        found[0, (middles < least) | (middles >= most)] = 0
        found[..., :4] = (
            found[..., order] if order else torch.cat((found[..., :2], found[..., 2:4] - found[..., :2]), 2)
        )
        if form == "rows":
            return [found]
        apart = [found[..., :4], found[..., 4], found[..., 5]]
        return apart if form == "end2end" else [found[..., :5], found[..., 5]]

    def check(order: list[int]) -> None:
        columns, upright = ([[outputs(order, axis, *half)] for half in ((0, 80), (80, 160))] for axis in (0, 1))
        check_axes(how, columns, upright, (SIDE, SIDE))

    about = Description(task="detect", takes="boxes", labels=LABELS)
    how = interpret(about, [list(each.shape) for each in outputs([0, 1, 2, 3], 0, 0, SIDE)], (SIDE, SIDE))
    assert (how.layout, has_two_orders(about, how)) == (form, True)
    check([0, 1, 2, 3])
    with pytest.raises(ValueError, match="its boxes begin with y"):
        check([1, 0, 3, 2])
    with pytest.raises(ValueError, match="boxes end before they begin"):
        check([])  # Corner and sides.


# Suppression inside
BOXES = torch.tensor([[[10.0, 20, 30, 40], [50, 60, 70, 80], [1, 2, 3, 4]]])
SCORES = torch.tensor([[0.9, 0.5, 0.4]])
CLASSES = torch.tensor([[2, 0, 1]])


def suppressed(layout: Any, *outputs: torch.Tensor) -> list[Any]:
    about = Description(task="detect", takes="boxes", labels=LABELS, layout=layout)
    how = interpret(about, [list(each.shape) for each in outputs], (96, 96))
    assert how.suppressed
    boxes, scores, classes = decoded(how, outputs, (96, 96))
    return [boxes.tolist(), scores.tolist(), classes.tolist(), how.layout, resize_of(about, how)]


def test_boxes_are_read_and_those_behind_the_stated_number_are_none() -> None:
    outputs = torch.cat((BOXES, SCORES[..., None]), 2), CLASSES
    found = [suppressed(stated, *each) for stated in (None, "mmdeploy") for each in (outputs, outputs[::-1])]
    assert found == [[BOXES.tolist(), SCORES.tolist(), CLASSES.tolist(), "mmdeploy", "top-left"]] * 4
    numbered = torch.tensor([[2]], dtype=torch.int32), BOXES, SCORES, CLASSES.int()
    found = [suppressed(stated, *numbered) for stated in (None, "end2end")]
    right = [[SCORES[0, 0].item(), SCORES[0, 1].item(), 0.0]]
    assert found == [[BOXES.tolist(), right, CLASSES.tolist(), "end2end", "letterbox"]] * 2


@pytest.mark.parametrize("count", [0, 1, 299, 300, 301, 900])
def test_the_best_are_answered_and_the_rest_filled_up_with_nothing(count: int) -> None:
    random = torch.Generator().manual_seed(count)
    scores = torch.rand(count, generator=random) * 0.9 + 0.05
    boxes, labels = torch.rand((count, 4), generator=random), torch.randint(1, 91, (count,), generator=random)
    how = Interpretation("boxes", "torchvision", 0, 0, True)
    found, values, classes = decoded(how, [boxes, scores, labels], (64, 64))
    assert [tuple(each.shape) for each in (found, values, classes)] == [(1, 300, 4), (1, 300), (1, 300)]
    kept = min(count, MOST_DETECTIONS)
    order = scores.sort(descending=True, stable=True).indices[:kept]
    assert torch.equal(values[0, :kept], scores[order])
    assert torch.equal(found[0, :kept], boxes[order])
    assert torch.equal(classes[0, :kept], labels[order].int())
    assert not values[0, kept:].any()
    assert decoded(how, [boxes, scores, labels * 0], (64, 64))[1].isinf().sum() == kept  # 0 is the background.


@pytest.mark.parametrize(
    ("shapes", "said"),
    [([(1, 6, 32, 32)], "of three channels or one; this one takes x"), ([(1, 3, 8, 8)] * 2, "KERAS_BACKEND=torch")],
)
def test_the_form_of_an_input_is_read_from_its_shape(shapes: Any, said: str) -> None:
    found = [entry_of(shape, False) for shape in (("n", 3, None, None), ("n", None, None, 3), (1, 6, 32, 32))]
    assert found == [(Entry(), None, None), (Entry(last=True), None, None), None]
    given: Any = type("Given", (), {"inputs": [Value("x", None, shape) for shape in shapes]})
    with pytest.raises(ValueError, match=said):
        image_trial._input(given, None)


def test_a_picture_for_one_channel_is_grey_before_it_is_resized(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (600, 400, 3), dtype=np.uint8)
    known = AdaptedFile(Whole((64, 64)), ("a", "b"))
    about = ("x", "onnx", known.labels, "x.onnx", str(tmp_path / "x.onnx"), (64, 64, 3), "detect", known)
    of_colours = ExportedImages(*about, export=Export(Interpretation("boxes", "yolov8", 2, 0), (1, 8)))
    of_grey = replace(of_colours, file=replace(known, grey=True))
    seen, right = (torch.zeros(64, 64, 3, dtype=torch.uint8) for _ in range(2))
    of_grey.preprocess(torch.from_numpy(pixels), seen, 400, 600)
    grey_picture = np.array(Image.fromarray(pixels).convert("L").convert("RGB"))
    of_colours.preprocess(torch.from_numpy(grey_picture), right, 400, 600)
    assert torch.equal(seen, right)
    assert torch.equal(grey(seen[None])[0], seen.float())


def tried(folder: Path, task: str, compute: Any, labels: Any = None, **stated: Any) -> Any:
    network = type("Given", (nn.Module,), {"forward": lambda self, x: compute(x)})()
    file = written(folder / "m.ts", network, torch.rand(1, 3, 32, 32))
    sidecar = {"task": task, "size": [32, 32], "mean": 0, "std": 1, **stated}
    return image_trial.tried(file, "script", sidecar, labels, task_class(task).takes)


def test_a_network_that_computes_no_numbers_for_noise_is_refused_and_ends_nothing(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"are not numbers \(NaN\): state what its input is"):
        tried(tmp_path, "embed", lambda x: (0.06 - x.var((2, 3))).sqrt())


def classes(x: Tensor) -> Tensor:
    """Return [n, 1, h, w]: the pixels' classes, 0 to 4, by their brightness; of noise all are 0."""
    grey = x.mean(1, keepdim=True)
    return (grey * 6).floor().clamp(0, 4) * (x.var((1, 2, 3), keepdim=True) < 0.06)


def mask(x: Tensor) -> Tensor:
    return (classes(x) > 2).float()


@pytest.mark.parametrize(
    ("compute", "labels", "read"),
    [
        (classes, None, (True, False)),
        (mask, list("abcde"), (True, False)),
        (mask, ["no", "yes"], (False, True)),
        (lambda x: x.softmax(1), None, (False, True)),
        (lambda x: 5 * x, None, (False, False)),
        (mask, None, "0 and 1 alone.* state labels"),
        (lambda x: (255 * mask(x)).byte(), ["no", "yes"], "class 255, and 2 labels"),
        (lambda x: classes(x)[:, 0], list("abcd"), "class 4, and 4 labels"),
        (lambda x: classes(x).int() - 1, None, "numbers below 0"),
        (lambda x: classes(x)[:, 0] / 2, None, "has fractions"),
    ],
)
def test_a_map_is_read_by_its_numbers_for_pictures(tmp_path: Path, compute: Any, labels: Any, read: Any) -> None:
    if isinstance(read, str):
        with pytest.raises(Exception, match=read):
            tried(tmp_path, "segment_semantic", compute, labels)
        return
    how = tried(tmp_path, "segment_semantic", compute, labels).export.how
    assert (how.class_map, how.probabilities) == read


def test_places_of_a_vector_may_have_their_channels_last(tmp_path: Path) -> None:
    found = tried(tmp_path, "embed", lambda x: x[:, :, ::4, ::4].permute(0, 2, 3, 1))
    picture = torch.rand(1, 3, 32, 32)
    [places] = decoded(found.export.how, [picture.permute(0, 2, 3, 1)], (32, 32))
    assert found.shapes == ((1, 3, 8, 8),)
    assert torch.equal(places, picture)


def test_which_of_several_outputs_is_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = tried(tmp_path, "embed", lambda x: (x.flatten(2), x.mean((2, 3))))
    _image_model("m", tmp_path / "m.ts", found, None)
    assert "m.ts: of its outputs 0 to 1, 1 is read, [3]." in caplog.text


def test_a_detector_that_finds_nothing_is_tried_with_noise_and_then_said_to_be_unchecked(tmp_path: Path) -> None:
    def one_box(shown: float) -> Any:
        there = lambda x: (x.var((1, 2, 3)) > shown).float()[:, None].expand(-1, 5)  # noqa: E731
        return lambda x: (there(x)[..., None] * torch.tensor([9.0, 2, 30, 7]), 2 * there(x), there(x))

    with pytest.raises(Exception, match=r"its scores .* are 0 to 2"):
        tried(tmp_path, "detect", one_box(0.06), list("ab"))
    found = tried(tmp_path, "detect", one_box(9), list("ab"))
    assert NOTHING in found.notes
    assert NOTHING in tried(tmp_path, "detect", lambda x: x.new_zeros(len(x), 0, 6), list("ab"), layout="rows").notes
    assert decoded(found.export.how, one_box(0)(torch.rand(1, 3, 32, 32)), (32, 32))[1].isinf().all()
