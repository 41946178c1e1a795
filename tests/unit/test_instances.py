"""models.tasks.instances: suppression, turned boxes and masks against plain definitions."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from models import Options
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile, made
from models.tasks import instances
from models.tasks.instances import (
    MAX_TURNED_CANDIDATES,
    MaskGrid,
    _sampled,
    _Scratch,
    combined,
    corners_of,
    polygons_of,
    probabilistic_iou,
    regular,
    suppress,
    suppress_turned,
)
from models.vision import torchvision

_SCRATCH = _Scratch()  # One for all: what is left in it must not show.


def candidates(seed, count, spread=300):
    generator = np.random.default_rng(seed)
    places, sides = generator.uniform(0, spread, (count, 2)), generator.uniform(4, 60, (count, 2))
    boxes = np.concatenate((places, places + sides), axis=1).astype(np.float32)
    # No two alike: the whole suppression leaves the order of equal scores open.
    scores = np.linspace(0.999, 0.001, count, dtype=np.float32)
    return boxes, scores, generator.integers(0, 3, count).astype(np.int32)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 5, 900, 3000]), st.sampled_from([1, 7, 300, 5000]))
def test_a_bounded_suppression_keeps_what_the_whole_one_keeps_first(seed, count, most):
    boxes, scores, classes = candidates(seed, count)
    found = suppress(boxes, scores, classes, 0.5, most)
    if not count:
        assert len(found) == 0
        return
    whole = torchvision.ops.batched_nms(
        torch.from_numpy(boxes).double(), torch.from_numpy(scores).double(), torch.from_numpy(classes), 0.5
    )
    assert found.tolist() == whole[:most].tolist()


def kept_one_by_one(boxes, classes, threshold):
    """Greedy suppression as it is defined: each candidate, if no kept one of its class overlaps it by more."""
    kept = []
    for number, (x1, y1, x2, y2) in enumerate(boxes.astype(np.float64).tolist()):
        for other in kept:
            left, top, right, bottom = boxes[other].astype(np.float64).tolist()
            shared = max(0.0, min(x2, right) - max(x1, left)) * max(0.0, min(y2, bottom) - max(y1, top))
            whole = (x2 - x1) * (y2 - y1) + (right - left) * (bottom - top) - shared
            if classes[number] == classes[other] and shared > threshold * whole:
                break
        else:
            kept.append(number)
    return kept


@pytest.mark.parametrize("count", [511, 512, 513, 1500])
@pytest.mark.parametrize("name", ["detect", "segment", "pose"])
def test_however_many_candidates_each_is_compared_with_all_that_are_kept(name, count):
    """Half of them lie where better ones do, far behind in the order of scores."""
    boxes, scores, classes = candidates(count, count, 2000)
    half = count // 2
    boxes[-half:], classes[-half:] = boxes[:half] + 1, classes[:half]
    task = made(name, AdaptedFile(Whole((640, 640)), ("a", "b", "c"), (), '{"keypoints": [17, 3]}'))
    kept = task.keep((boxes, scores, classes), Options(iou_threshold=0.5, max_detections=30_000))
    assert kept.tolist() == kept_one_by_one(boxes, classes, 0.5)
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
    whole = torchvision.ops.nms(torch.from_numpy(boxes).double(), torch.from_numpy(scores).double(), threshold)
    assert suppress(boxes, scores, np.zeros(count, np.int32), threshold, count).tolist() == whole.tolist()


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


def test_the_regular_form_is_the_same_box():
    boxes = np.array([[10.0, 20, 4, 30], [10, 20, 30, 4]])
    angles = np.array([-0.4, 2.9])
    again, turned = regular(boxes, angles)
    assert (again[:, 2] >= again[:, 3]).all()
    assert ((turned >= 0) & (turned < math.pi)).all()
    for one, other in zip(corners_of(boxes, angles), corners_of(again, turned), strict=True):
        assert sorted(map(tuple, one.round(6).tolist())) == sorted(map(tuple, other.round(6).tolist()))


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
