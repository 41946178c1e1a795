"""Numbers of detectors on pictures: what their layout cannot have is refused, what can be told is read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.exports.layouts import cells_of, decoded, interpret
from models.exports.metadata import Description
from models.exports.objects import check_axes, has_two_orders, located

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
    raw[..., :4] = 5 / by
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


def counted(boxes: Any = lambda box: box, by: float = 1.0) -> list[Tensor]:
    found = rows(by=by)
    found[0, :4, :4] = torch.tensor([boxes([each / by for each in box]) for box, *_ in FOUND])
    return [COUNTED, found[..., :4], found[..., 4], found[..., 5]]


CENTRES = cells_of((8, 16, 32), (SIDE, SIDE))
SIDES = 10 + 40 * torch.rand((525, 2), generator=torch.Generator().manual_seed(0))


def grid(boxes: Tensor, by: float = 1.0) -> Tensor:
    """Return candidates of three classes around all cells."""
    return torch.cat((boxes / by, torch.rand((525, 3), generator=torch.Generator().manual_seed(1))), 1).T[None]


def queries(slots: int = 4) -> tuple[Tensor, Tensor]:
    """Return logits and boxes of 30 queries."""
    logits, boxes = torch.full((1, 30, slots), -6.0), torch.full((1, 30, 4), 0.5)
    for place, (box, number, score) in enumerate(FOUND):
        logits[0, place, number] = math.log(score / (1 - score))
        boxes[0, place] = torch.tensor(centred(box, SIDE))
    return logits, boxes


def pairs() -> Tensor:
    """Return queries with a score for each of two classes, [1, 30, 6]."""
    found = torch.full((1, 30, 6), 1e-3)
    for place, (box, number, score) in enumerate(FOUND):
        found[0, place, :4] = torch.tensor(centred(box, SIDE))
        found[0, place, 4 + number % 2] = score
    return found


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
        ([columns(SIDE)], {"layout": "yolov8"}, IN_SHARES),
        ([columns(SIDE).mT.contiguous()], {}, IN_SHARES),
        ([columns(logits=True)], {"scores": "sigmoid"}, ""),
        ([columns()], {"scores": "sigmoid"}, ""),
        ([columns(objectness=True)], {}, ""),
        ([columns(SIDE, objectness=True)], {}, IN_SHARES),
        ([rows()], {}, ""),
        (counted(), {}, ""),
        (counted()[1:], {}, ""),
        ([*queries()], {"layout": "rfdetr"}, ""),
        ([*queries()[::-1]], {"layout": "rfdetr"}, ""),
        ([rows(lambda box, number, score: [*centred(box, SIDE), score, number])], {"layout": "rtdetr"}, ""),
    ],
)
def test_the_same_objects_are_read(outputs: list[Tensor], stated: dict[str, Any], note: str) -> None:
    assert read(outputs, **stated) == ([(list(box), number, score) for box, number, score in FOUND], note)


def test_candidates_around_their_cells_are_read() -> None:
    for by, note in ((1.0, ""), (SIDE, IN_SHARES)):
        assert read([grid(torch.cat((CENTRES, SIDES), 1), by)])[1] == note


def test_queries_that_all_find_one_large_object_are_no_corners() -> None:
    logits, _ = queries()
    assert read([logits, torch.tensor([0.5, 0.5, 0.9, 0.9]).expand(1, 30, 4)], layout="rfdetr")[0]


def test_queries_with_two_scores_are_no_rows() -> None:
    found = [(list(box), number % 2, score) for box, number, score in FOUND]
    for labels in (("one", "two"), None):
        assert read([pairs()], layout="rtdetr", labels=labels)[0] == found


@pytest.mark.parametrize(
    ("outputs", "stated", "said"),
    [
        ([columns(logits=True)], {}, 'state "scores": "sigmoid"'),
        ([columns()], {"scores": "logits"}, '"scores": "logits" has no effect on a detector'),
        ([rows()], {"scores": "sigmoid"}, 'no effect on a detector with the layout "rows"'),
        ([rows(by=SIDE)], {}, "its boxes lie in 0 to 1"),
        (counted(by=SIDE), {}, "its boxes lie in 0 to 1"),
        ([rows(lambda box, number, score: [number, score, *box])], {}, "its scores .* are 0 to 150"),
        ([rows(lambda box, number, score: [*box, number, score])], {}, "its scores .* are 0 to 2"),
        ([rows(lambda box, number, score: [*box, min(number, 1), score])], {}, "whole numbers from 0 on"),
        ([rows(lambda box, number, score: [*centred(box), score, number])], {}, "end before they begin"),
        ([rows(lambda box, number, score: [*box, 100 * score, number])], {}, "its scores .* are 0 to 90"),
        ([rows(lambda box, number, score: [*box, score, number + 1])], {}, "class 3, and its 3 labels"),
        ([counted()[place] for place in (0, 1, 3, 2)], {}, "its scores .* are 0 to 2"),
        ([counted()[place] for place in (1, 2, 3, 0)], {}, "in this order"),
        (
            [rows(lambda box, number, score: [*centred(box), score, number])],
            {"layout": "rtdetr"},
            "has boxes in 0 to 1",
        ),
        ([queries()[0], queries()[0]], {"layout": "rfdetr"}, "neither has boxes"),
        ([grid(torch.cat((CENTRES - SIDES / 2, CENTRES + SIDES / 2), 1))], {}, "are corners"),
        ([grid(torch.cat((CENTRES - SIDES / 2, CENTRES + SIDES / 2), 1), SIDE)], {}, "are corners"),
        ([grid(torch.cat((CENTRES - SIDES / 2, SIDES), 1))], {}, "begin at their upper left"),
        ([grid(torch.cat((CENTRES - SIDES / 2, SIDES), 1), SIDE)], {}, "begin at their upper left"),
        ([grid(torch.cat((CENTRES.flip(1), SIDES), 1))], {}, "begin with y"),
        (
            [queries(3)[0], torch.cat((CENTRES - SIDES / 2, CENTRES + SIDES / 2), 1)[None, 100:130] / SIDE],
            {"layout": "rfdetr"},
            "are corners",
        ),
        ([queries(3)[1], queries(3)[0].sigmoid()], {"layout": "rfdetr"}, "has logits, and its scores are in 0 to 1"),
    ],
)
def test_numbers_that_the_layout_cannot_have_are_refused(
    outputs: list[Tensor], stated: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read(outputs, **stated)


def test_angles_in_degrees_are_refused() -> None:
    turned = torch.cat((columns(), torch.full((1, 1, 525), 30.0)), 1)
    with pytest.raises(ValueError, match="radians are expected"):
        read([turned], "obb")
    with pytest.raises(ValueError, match="lie in 0 to 1"):
        read([torch.cat((columns(SIDE), torch.ones((1, 1, 525))), 1)], "obb")


def test_a_network_that_finds_nothing_is_read_as_its_layout_says() -> None:
    assert read([torch.zeros((1, 100, 6))]) == ([], "")


@pytest.mark.parametrize("form", ["rows", "mmdeploy", "end2end"])
def test_boxes_that_follow_what_is_visible_along_the_other_axis_begin_with_y(form: str) -> None:
    def outputs(order: list[int], axis: int, least: int, most: int) -> list[Tensor]:
        """Return the objects whose middle lies there, in another order of numbers."""
        found = rows()
        middles = (found[0, :, axis] + found[0, :, axis + 2]) / 2
        found[0, (middles < least) | (middles >= most)] = 0
        found[..., :4] = found[..., order]
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
    with pytest.raises(ValueError, match=r"boxes\[\.\.\., \[1, 0, 3, 2\]\]"):
        check([1, 0, 3, 2])
