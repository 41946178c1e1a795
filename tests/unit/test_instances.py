"""Suppression, turned boxes and masks against plain definitions; the forms of masks, and the bounds of their cost."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from models import Options, Placement, open_model, parse_spec
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile, made
from models.tasks import detect, instances
from models.tasks.accuracy import Boxes, average_precision
from models.tasks.instances import (
    MAX_TURNED_CANDIDATES,
    MaskGrid,
    _sampled,
    _Scratch,
    combined,
    compressed,
    polygons_of,
    probabilistic_iou,
    run_lengths,
    suppress,
    suppress_turned,
    written,
)
from models.vision import torchvision
from tests.support.images import whole_mask

_SCRATCH = _Scratch()  # One for all: what is left in it must not show.


def candidates(seed, count, spread=300):
    generator = np.random.default_rng(seed)
    places, sides = generator.uniform(0, spread, (count, 2)), generator.uniform(4, 60, (count, 2))
    boxes = np.concatenate((places, places + sides), axis=1).astype(np.float32)
    # No two alike: the whole suppression leaves the order of equal scores open.
    scores = np.linspace(0.999, 0.001, count, dtype=np.float32)
    return boxes, scores, generator.integers(0, 3, count).astype(np.int32)


def by_torchvision(boxes, scores, classes, threshold):
    given = (torch.from_numpy(each) for each in (boxes.astype(np.float64), scores.astype(np.float64), classes))
    return torchvision.ops.batched_nms(*given, threshold).tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 5, 900, 3000]), st.sampled_from([1, 7, 300, 5000]))
def test_a_bounded_suppression_keeps_what_the_whole_one_keeps_first(seed, count, most):
    boxes, scores, classes = candidates(seed, count)
    found = suppress(boxes, scores, classes, 0.5, most).tolist()
    assert found == (by_torchvision(boxes, scores, classes, 0.5)[:most] if count else [])


@pytest.mark.parametrize("count", [511, 512, 513, 1500])
@pytest.mark.parametrize("name", ["detect", "segment", "pose"])
def test_however_many_candidates_each_is_compared_with_all_that_are_kept(name, count):
    """Half of them lie where better ones do, far behind in the order of scores."""
    boxes, scores, classes = candidates(count, count, 2000)
    half = count // 2
    boxes[-half:], classes[-half:] = boxes[:half] + 1, classes[:half]
    task = made(name, AdaptedFile(Whole((640, 640)), ("a", "b", "c"), (), '{"keypoints": [17, 3]}'))
    kept = task.keep((boxes, scores, classes), Options(iou_threshold=0.5, max_detections=30_000))
    assert kept.tolist() == by_torchvision(boxes, scores, classes, 0.5)
    assert len(kept) < count - half + 50


def test_two_boxes_that_overlap_by_exactly_the_threshold_both_stay():
    boxes = np.float32([[0, 0, 2, 2], [0, 0, 2, 1]])
    classes = np.zeros(2, np.int32)
    scores = np.float32([0.9, 0.8])
    assert suppress(boxes, scores, classes, 0.5, 9).tolist() == [0, 1]
    assert suppress(boxes, scores, classes, np.nextafter(0.5, 0), 9).tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.sampled_from([0.0, 1 / 3, 0.5, 0.7, 1.0]))
def test_boxes_that_touch_coincide_or_are_inside_out_go_as_torchvision_says(seed, count, threshold):
    """Of whole numbers, so that overlaps are the threshold itself and many boxes have no area."""
    generator = np.random.default_rng(seed)
    boxes = generator.integers(0, 12, (count, 4)).astype(np.float32)
    boxes[: count // 2, 2:] += boxes[: count // 2, :2]
    scores = np.linspace(0.999, 0.001, count, dtype=np.float32)
    classes = np.zeros(count, np.int32)
    found = suppress(boxes, scores, classes, threshold, count).tolist()
    assert found == by_torchvision(boxes, scores, classes, threshold)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 40), st.integers(1, 90), st.integers(1, 90))
def test_logits_of_masks_are_the_sums_of_weighted_prototypes(count, depth, height, width):
    """Whole numbers, whose sums float32 has exactly, of a part of larger prototypes."""
    generator = np.random.default_rng(count * depth)
    coefficients = generator.integers(-9, 9, (count, depth)).astype(np.float32)
    prototypes = generator.integers(-9, 9, (depth, 90, 90)).astype(np.float32)[:, :height, :width]
    assert (combined(coefficients, prototypes) == np.einsum("km,mhw->khw", coefficients, prototypes)).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 40, 600]))
def test_turned_boxes_go_when_any_better_one_overlaps(seed, count):
    boxes, _, classes = candidates(seed, count, 120)
    generator = np.random.default_rng(seed)
    turned = np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), axis=1)
    angles = generator.uniform(-math.pi / 4, 3 * math.pi / 4, count)
    overlaps = probabilistic_iou(turned, angles, turned, angles)
    expected = [j for j in range(count) if not any(overlaps[j, i] > 0.3 and classes[i] == classes[j] for i in range(j))]
    assert suppress_turned(turned, angles, classes, 0.3, 50).tolist() == expected[:50]


def test_the_work_for_turned_boxes_is_bounded(monkeypatch):
    boxes, _, classes = candidates(0, 30_000, 5000)
    angles = np.zeros(len(boxes), np.float32)
    compared = []

    def counted(some, some_angles, others, other_angles):
        compared.append(len(some) * len(others))
        return probabilistic_iou(some, some_angles, others, other_angles)

    monkeypatch.setattr(instances, "probabilistic_iou", counted)
    kept = suppress_turned(boxes, angles, classes, 0.99, 30_000)
    assert len(kept) <= MAX_TURNED_CANDIDATES
    assert sum(compared) <= MAX_TURNED_CANDIDATES**2


@pytest.mark.parametrize("share", [(0.1, 0.2, 0.8, 0.9), (0, 0, 1, 1), (0, 0.6, 0.2, 1)])
@pytest.mark.parametrize(("width", "height"), [(320, 320), (320, 240), (240, 320), (333, 517), (97, 301), (900, 500)])
def test_a_mask_is_that_of_the_whole_image_cut_at_the_box(width, height, share):
    """At the image's edge, too, beside which prototypes go on with what the network makes of the padding."""
    generator = np.random.default_rng(0)
    smooth = functional.interpolate(
        torch.from_numpy(generator.standard_normal((1, 8, 10, 10))), (80, 80), mode="bicubic"
    )
    prototypes = smooth[0].float().numpy()
    coefficients = generator.standard_normal(8).astype(np.float32)
    gain = min(320 / width, 320 / height)
    inner = (max(1, round(width * gain)), max(1, round(height * gain)))
    left, top = (round((320 - side) / 2 - 0.1) for side in inner)
    grid = MaskGrid.of((0.25, 0.25), (left, top, left + inner[0], top + inner[1]), (width, height))
    inside = np.zeros(prototypes.shape, bool)
    inside[:, top // 4 : -(-(top + inner[1]) // 4), left // 4 : -(-(left + inner[0]) // 4)] = True
    prototypes = np.where(inside, prototypes, -100 * prototypes)
    logits = torch.from_numpy(np.tensordot(coefficients, prototypes, 1))[None, None]
    large = functional.interpolate(logits, scale_factor=grid.enlargement, mode="bilinear")
    part = large[:, :, grid.first[1] : grid.last[1], grid.first[0] : grid.last[0]]
    whole = (functional.interpolate(part, (height, width), mode="bilinear")[0, 0] > 0).numpy()
    box = np.array(share) * (width, height, width, height)
    # Alone, and of several whose boxes overlap, which are computed in another way.
    [(mask, x, y)] = grid.masks(coefficients[None], prototypes, box[None])
    several = [*grid.masks(np.stack([-coefficients, coefficients, coefficients]), prototypes, np.stack([box] * 3))]
    assert all((several[number][0] != mask).mean() < 1e-4 for number in (1, 2))
    assert ((several[0][0] == mask).mean()) < 1e-4
    [(empty, *_)] = grid.masks(coefficients[None], prototypes, np.array([[5.0, 5, 5, 9]]))
    assert empty.size == 0
    assert (x, y) == (math.ceil(box[0]), math.ceil(box[1]))
    expected = whole[y : math.ceil(box[3]), x : math.ceil(box[2])]
    assert mask.shape == expected.shape
    assert (mask != expected).mean() < 0.001


def test_polygons_hold_no_more_points_than_they_may():
    noise = (np.random.default_rng(0).uniform(size=(400, 400)) > 0.5).astype(np.uint8)
    rings = polygons_of(noise, 5, 7, 500)
    assert 0 < sum(map(len, rings)) <= 500
    square = np.zeros((10, 10), np.uint8)
    square[2:6, 3:8] = 1
    [ring] = polygons_of(square, 100, 200, 500)
    assert ring.tolist() == [[103, 202], [103, 205], [107, 205], [107, 202]]
    assert polygons_of(np.zeros((4, 4), np.uint8), 0, 0, 500) is None


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 9999))
def test_the_quick_way_of_sampling_is_the_slow_one_to_the_bit(factor: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=random.integers(3, 40, 2)).astype(np.float32)
    height, width = (side * factor for side in values.shape)
    x, y = (int(random.integers(0, side)) for side in (width, height))
    size = int(random.integers(1, width - x + 1)), int(random.integers(1, height - y + 1))
    step = 1 / factor
    offsets = (x + 0.5) * step - 0.5, (y + 0.5) * step - 0.5
    matrix = np.array([[step, 0, offsets[0]], [0, step, offsets[1]]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    expected = cv2.warpAffine(values, matrix, size, flags=flags, borderMode=cv2.BORDER_REPLICATE)
    found, left, top = _sampled(values, (step, step), offsets, size, _SCRATCH)
    np.testing.assert_array_equal(found[top : top + size[1], left : left + size[0]], expected)


def mask_of(runs: list[int], width: int, height: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    values = np.repeat(np.arange(len(runs)) % 2, runs)
    assert len(values) == width * height
    mask: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = values.reshape(width, height).T
    return mask


def lengths_of(text: str) -> list[int]:
    """As COCO's own `rleFrString`, from its description."""
    runs: list[int] = []
    place = 0
    while place < len(text):
        value = shift = 0
        while True:
            bits = ord(text[place]) - 48
            value |= (bits & 31) << shift
            place, shift = place + 1, shift + 5
            if not bits & 32:
                if bits & 16:
                    value |= -1 << shift
                break
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs


@given(st.data())
def test_a_mask_is_read_back_as_it_was(data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    # A box may reach a pixel beyond the image.
    shape = data.draw(st.integers(1, height - y + 1)), data.draw(st.integers(1, width - x + 1))
    density = data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    part = (np.random.default_rng(data.draw(st.integers(0, 99))).random(shape) < density).astype(np.uint8)
    runs = run_lengths(part, x, y, width, height)
    whole = np.zeros((height, width), np.uint8)
    whole[y : y + shape[0], x : x + shape[1]] = part[: height - y, : width - x]
    assert (mask_of(runs.tolist(), width, height) == whole).all()
    assert all(length > 0 for length in runs[1:])
    [text] = compressed([runs])
    assert lengths_of(text) == runs.tolist()


def test_the_text_is_the_one_that_coco_writes() -> None:
    # Lengths and text of the published annotation format: differences from the fourth on, five bits a character.
    assert compressed([np.array([6, 1, 40, 4, 5, 4, 5, 4, 21])]) == ["61X13mN000`0"]


@pytest.mark.parametrize("together", [0, 30, 100_000])
def test_masks_are_written_one_by_one_or_together_alike(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr("models.tasks.instances._RUNS_TOGETHER", together)
    random = np.random.default_rng(0)
    parts = [((random.random((9, 7)) < share).astype(np.uint8), 2, 3) for share in (0.5, 0, 1, 0.2, 0.9, 0)]
    parts.append((np.zeros((0, 0), np.uint8), 5, 5))
    found = list(written("rle", iter(parts), 20, 30))
    assert [each is None for each in found] == [not mask.any() for mask, _, _ in parts]
    for each, (mask, x, y) in zip(found, parts, strict=True):
        if each is not None:
            whole = mask_of(lengths_of(each["counts"]), 20, 30)
            assert each["size"] == [30, 20]
            assert (whole[y : y + 9, x : x + 7] == mask).all()
            assert whole.sum() == mask.sum()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_model(parse_spec("yolov8n-seg:random"), tmp_path_factory.mktemp("cache"))


def outputs(count: int = 6, side: float = 120.0) -> tuple[Any, ...]:
    """As `reduce` returns them: boxes within the image's part of the input, smooth prototypes."""
    random = np.random.default_rng(0)
    noise = random.normal(size=(32, 160, 160)).astype(np.float32)
    prototypes = np.stack([cv2.GaussianBlur(each, (0, 0), 6) for each in noise])
    centres = random.uniform((side / 2, 80 + side / 2), (640 - side / 2, 560 - side / 2), (count, 2))
    boxes = np.concatenate((centres - side / 2, centres + side / 2), axis=1).astype(np.float32)
    scores = np.linspace(0.9, 0.5, count).astype(np.float32)
    return (
        boxes,
        scores,
        np.arange(count, dtype=np.int32),
        random.normal(size=(count, 32)).astype(np.float32),
        prototypes,
    )


def detections(model: Any, form: str, **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = model.postprocess(
        outputs(),
        model.placement(640, 480),
        Options(masks=form, **more),  # type: ignore[arg-type]
    )["detections"]
    return found


def test_every_form_is_the_same_mask(model: Any) -> None:
    polygons, runs, images = (detections(model, form) for form in ("polygon", "rle", "png"))
    assert len(polygons) == len(runs) == len(images) == 6
    for polygon, run, image in zip(polygons, runs, images, strict=True):
        expected = whole_mask(image["mask"]).astype(np.uint8)
        [counts] = compressed([run_lengths(expected, 0, 0, 640, 480)])
        assert run["mask"] == {"size": [480, 640], "counts": counts}
        filled = np.zeros((480, 640), np.uint8)
        rings = [np.array(ring, np.int32) for ring in polygon["segments"]]
        cv2.drawContours(filled, rings, -1, 1, cv2.FILLED)
        # Outlines lose holes, and the smallest parts.
        assert (filled & expected).sum() >= 0.97 * expected.sum()
        assert polygon["box"] == run["box"] == image["box"]


@pytest.mark.parametrize("form", ["rle", "png"])
def test_a_box_without_height_has_no_mask_in_any_form(form: Any) -> None:
    assert list(written(form, [(np.zeros((0, 5), np.uint8), 0, 9)], 5, 9)) == [None]


def test_the_longer_side_of_a_turned_box_is_that_in_the_image() -> None:
    """Sides may be scaled differently, as a letterbox is rounded to whole pixels: as Ultralytics scales, then swaps."""
    fit: Any = SimpleNamespace(pad=np.zeros(2), scale=np.array([2.0, 4.0]), placement=Placement(100, 100))
    outputs = [np.array([[8, 8, 4, 6]], np.float32), None, None, np.zeros((1, 1), np.float32)]
    found = detect.TurnedBoxes.locate(cast(Any, None), cast(Any, outputs), np.array([0]), fit)
    assert found["turned"].tolist() == [[4, 2, 2, 1.5, 0]]


def test_boxes_under_the_least_area_are_left_out_with_what_belongs_to_them(model: Any) -> None:
    boxes, *others = outputs()
    boxes[::2, 2:] = boxes[::2, :2] + 30  # The image is not scaled: 900 pixels.
    placement = model.placement(640, 480)

    def found(**more: Any) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = model.postprocess((boxes, *others), placement, Options(**more))["detections"]
        return entries

    assert found(min_area=899.0) == found()
    assert [each["class_id"] for each in found(min_area=901.0)] == [1, 3, 5]
    assert found(min_area=901.0) == [each for each in found() if each["class_id"] % 2]
    tensors = model.tensors((boxes, *others), placement, Options(min_area=901.0))
    assert (tensors["num_detections"], len(tensors["masks"]), tensors["classes"].tolist()) == (3, 3, [1, 3, 5])
    assert found(min_area=1e9) == []


def test_only_so_many_pixels_of_masks_are_looked_at(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_MASK_PIXELS", 3 * 125 * 125)
    found = detections(model, "rle")
    assert [each["mask"] is None for each in found] == [False] * 3 + [True] * 3


def _boxes(*rows: tuple[float, float, float, float, int, float]) -> Boxes:
    table = np.array(rows, dtype=np.float32).reshape(-1, 6)
    return Boxes(table[:, :4], table[:, 4].astype(np.int64), table[:, 5])


TRUE = _boxes((0, 0, 10, 10, 0, 1), (20, 20, 30, 30, 0, 1))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (_boxes((0, 0, 10, 10, 0, 0.9), (20, 20, 30, 29, 0, 0.8)), 1.0),
        (_boxes(), 0.0),
        (_boxes((0, 0, 10, 10, 1, 0.9)), 0.0),
        (_boxes((0, 0, 10, 4, 0, 0.9)), 0.0),
        (_boxes((0, 0, 10, 10, 0, 0.9)), 51 / 101),
        (_boxes((0, 0, 10, 10, 0, 0.9), (0, 0, 10, 10, 0, 0.8)), 51 / 101),
        (_boxes((50, 50, 60, 60, 0, 0.9), (0, 0, 10, 10, 0, 0.8)), 51 / 101 / 2),
    ],
    ids=["all right", "nothing found", "another class", "too far off", "half of them", "a double", "one false alarm"],
)
def test_average_precision(found: Boxes, wanted: float) -> None:
    assert average_precision([TRUE], [found], 0) == pytest.approx(wanted)
