"""The sample models: their images, the loss of the detector, and that the shipped weights are as good as recorded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torchvision.ops import box_iou, complete_box_iou_loss

from benchmarks.sample_training import evaluate, images
from benchmarks.sample_training.loss import (
    TOP_K,
    Assignment,
    Objects,
    assign,
    complete_iou,
    detection_loss,
    distribution_focal_loss,
    iou,
)
from benchmarks.sample_training.rounding import rounded
from benchmarks.sample_training.train import RECIPES
from models import sample
from models.sample import generator
from models.sample.generator import KINDS, classification_image, detection_image
from models.tasks.accuracy import Boxes, average_precision
from models.yolo.yolov8 import YOLOv8, anchors

DIRECTORY = Path(sample.__file__).parent
SIZES = st.sampled_from([(64, 64), (96, 128), (160, 90)])
SEEDS = st.integers(0, 10_000)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and on a busy machine they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Images


def test_an_image_depends_on_seed_index_and_size_alone() -> None:
    wanted = [detection_image(3, index, (120, 90)) for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda index: detection_image(3, index, (120, 90)), reversed(range(4))))[::-1]
    for first, second in zip(wanted, found, strict=True):
        assert all(np.array_equal(first[part], second[part]) for part in range(3))
    assert np.array_equal(classification_image(3, 0, (64, 64))[0], classification_image(3, 0, (64, 64))[0])


@pytest.mark.parametrize("draw", [classification_image, detection_image])
def test_other_seeds_and_indices_give_other_images(draw: Any) -> None:
    drawn = [draw(seed, index, (64, 64))[0].tobytes() for seed in range(3) for index in range(3)]
    assert len(set(drawn)) == 9


def test_every_kind_is_drawn_about_as_often() -> None:
    count = np.bincount([classification_image(5, i, (32, 32))[1] for i in range(500)], minlength=len(KINDS))
    assert len(count) == len(KINDS)
    assert count.min() >= 25


@settings(max_examples=60, deadline=None)
@given(SEEDS, SEEDS, SIZES)
def test_boxes_lie_inside_the_image(seed: int, index: int, size: tuple[int, int]) -> None:
    rgb, boxes, classes = detection_image(seed, index, size)
    assert rgb.shape == (size[1], size[0], 3)
    assert [array.dtype.name for array in (rgb, boxes, classes)] == ["uint8", "float32", "int64"]
    assert 1 <= len(boxes) == len(classes) <= 8
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] < boxes[:, 2:]).all()
    assert (boxes[:, 2:] <= size).all()
    assert set(classes.tolist()) <= set(range(len(KINDS)))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(0, len(KINDS) - 1), st.floats(10, 110), st.floats(10, 70), st.floats(6, 30))
def test_a_box_is_tight_around_what_is_visible(seed: int, class_id: int, x: float, y: float, radius: float) -> None:
    canvas = generator._Canvas(np.random.default_rng(seed), 120, 80)
    before = canvas.pixels.copy()
    canvas.place(class_id, x, y, radius)
    changed = np.abs(canvas.pixels - before).max(axis=2) > 1
    if not canvas.shapes:  # too much of it would have been outside
        assert not changed.any()
        return
    x1, y1, x2, y2 = generator._box(canvas.shapes[0].visible)
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    # Rims are blended with what is behind them: up to two pixels belong to the shape in part only, three at a thin tip.
    assert np.abs(np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) - (x1, y1, x2, y2)).max() <= 3


def test_most_of_every_labelled_shape_stays_visible() -> None:
    for seed in range(20):
        canvas = generator._Canvas(np.random.default_rng(seed), 100, 100)
        canvas.place(2, 50, 50, 30)
        canvas.clutter(30)
        for x in range(20, 90, 10):
            canvas.place(7, x, x, 25)
        assert canvas.shapes
        assert all(shape.visible.sum() >= 0.7 * shape.area for shape in canvas.shapes)


def test_the_sample_images_are_those_of_the_generator(tmp_path: Path) -> None:
    images.main([str(tmp_path)])
    names = sorted(path.name for path in sample.IMAGES.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert json.loads((tmp_path / "expected.json").read_text()) == _expected()
    for path in sample.IMAGES.glob("*.jpg"):
        assert path.stat().st_size < 100_000
        stored, drawn = (np.array(Image.open(file), dtype=np.int16) for file in (path, tmp_path / path.name))
        assert np.abs(stored - drawn).mean() < 1  # JPEG codecs differ by a rounding


# The loss


def boxes_like(draw: st.DrawFn, count: int, side: int = 64) -> Tensor:
    corners = st.lists(st.floats(0, side - 2, width=32), min_size=2 * count, max_size=2 * count)
    sizes = st.lists(st.floats(1, side, width=32), min_size=2 * count, max_size=2 * count)
    left_top = torch.tensor(draw(corners), dtype=torch.float32).view(count, 2)
    return torch.cat((left_top, left_top + torch.tensor(draw(sizes), dtype=torch.float32).view(count, 2)), dim=1)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Objects, Assignment]:
    """Draw the arguments of `assign` for a batch of two 64 x 64 images, and its answer."""
    count = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    centres, strides = anchors(64, 64)
    centres = centres * strides.unsqueeze(1)
    scores = torch.rand(2, len(centres), 3, generator=generator)
    reach = torch.rand(2, len(centres), 4, generator=generator) * draw(st.floats(1, 40))
    predicted = torch.cat((centres - reach[..., :2], centres + reach[..., 2:]), dim=2)
    valid = torch.tensor(draw(st.lists(st.booleans(), min_size=2 * count, max_size=2 * count))).view(2, count)
    boxes = torch.stack((boxes_like(draw, count), boxes_like(draw, count)))
    classes = torch.randint(3, (2, count), generator=generator)
    objects = Objects(boxes, classes, valid)
    return scores, predicted, centres, objects, assign(scores, predicted, centres, objects)


@settings(max_examples=60, deadline=None)
@given(assignments())
def test_assignment(case: tuple[Tensor, Tensor, Tensor, Objects, Assignment]) -> None:
    _, predicted, centres, objects, (positive, owner, quality) = case
    assert (quality[~positive] == 0).all()
    assert ((quality >= 0) & (quality <= 1)).all()
    for image in range(2):
        for number, box in enumerate(objects.boxes[image]):
            mine = positive[image] & (owner[image] == number)
            inside = ((centres > box[:2]) & (centres < box[2:])).all(dim=1)
            assert not (mine & ~inside).any(), "anchors lie inside their object"
            assert int(mine.sum()) <= TOP_K
            if not objects.valid[image, number]:
                assert not mine.any(), "padding owns nothing"
            elif mine.any() and float(quality[image][mine].max()) > 0:
                best = iou(predicted[image][mine], box.unsqueeze(0)).max()
                assert float(quality[image][mine].max()) == pytest.approx(float(best), rel=1e-4)
        lonely = objects.valid[image].sum() == 1
        if lonely:
            box = objects.boxes[image][objects.valid[image]][0]
            inside = ((centres > box[:2]) & (centres < box[2:])).all(dim=1)
            assert int(positive[image].sum()) == min(TOP_K, int(inside.sum())), "an object alone gets its full share"


def test_an_anchor_two_objects_want_goes_to_the_one_it_overlaps_more() -> None:
    centres = torch.tensor([[8.0, 8.0]])
    objects = Objects(
        torch.tensor([[[0.0, 0, 30, 30], [0.0, 0, 16, 16]]]), torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)
    )
    answer = assign(torch.tensor([[[0.9, 0.1]]]), torch.tensor([[[0.0, 0, 16, 16]]]), centres, objects)
    assert answer.owner.tolist() == [[1]]
    assert answer.quality.tolist() == [[1.0]]


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_overlaps_are_those_of_torchvision(data: st.DataObject) -> None:
    first, second = data.draw(st.composite(boxes_like)(5)), data.draw(st.composite(boxes_like)(5))
    torch.testing.assert_close(iou(first.unsqueeze(1), second.unsqueeze(0)), box_iou(first, second))
    torch.testing.assert_close(
        1 - complete_iou(first, second), complete_box_iou_loss(first, second), atol=1e-5, rtol=1e-4
    )


def test_distribution_focal_loss_is_least_where_the_two_bins_share_as_the_distance_lies() -> None:
    distances = torch.tensor([[0.0, 2.25, 7.5, 40.0]])  # the last is beyond the bins and cut off at 14.99
    shares = torch.zeros(1, 4, 16)
    shares[0, 0, 0] = 1
    shares[0, 1, 2], shares[0, 1, 3] = 0.75, 0.25
    shares[0, 2, 7], shares[0, 2, 8] = 0.5, 0.5
    shares[0, 3, 14], shares[0, 3, 15] = 0.01, 0.99
    best = shares.clamp(min=1e-9).log().requires_grad_()
    loss = distribution_focal_loss(best, distances)
    (gradient,) = torch.autograd.grad(loss.sum(), best)
    assert gradient.abs().max() < 1e-3
    assert float(distribution_focal_loss(torch.zeros(1, 4, 16), distances)) == pytest.approx(np.log(16))


def test_the_loss_of_a_batch_without_objects_is_finite_and_pushes_scores_down() -> None:
    outputs = [torch.zeros(1, 64 + 2, 64 // s, 64 // s, requires_grad=True) for s in (8, 16, 32)]
    nothing = Objects(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.bool))
    detection_loss(outputs, nothing, (64, 64)).backward()
    for output in outputs:
        assert output.grad is not None
        assert (output.grad[:, 64:] > 0).all()
        assert (output.grad[:, :64] == 0).all()


def test_a_few_steps_on_two_images_bring_the_loss_down() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = YOLOv8("n", len(KINDS))
    items = [evaluate.DetectionImages(1, 0, 96)[index] for index in (1, 5)]
    x = torch.stack([pixels for pixels, _, _ in items]).permute(0, 3, 1, 2) / 255
    most = max(len(classes) for _, _, classes in items)
    objects = Objects(
        torch.zeros(2, most, 4), torch.zeros(2, most, dtype=torch.long), torch.zeros(2, most, dtype=torch.bool)
    )
    for image, (_, boxes, classes) in enumerate(items):
        objects.boxes[image, : len(boxes)] = boxes
        objects.classes[image, : len(boxes)] = classes
        objects.valid[image, : len(boxes)] = True
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=2e-3)
    losses = []
    for _ in range(12):
        loss = detection_loss(network.raw(x), objects, (96, 96))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


# Rounding


@given(SEEDS, st.sampled_from([torch.float16, torch.float32]), st.floats(1e-6, 1e3), st.sampled_from([64, 128, 256]))
@settings(max_examples=60, deadline=None)
def test_weights_are_rounded_to_steps_of_their_output_channel(
    seed: int, dtype: torch.dtype, largest: float, steps: int
) -> None:
    weights = torch.randn(4, 8, 3, 3, generator=torch.Generator().manual_seed(seed))
    weights *= torch.tensor([1.0, 0.1, 1e-3, 0.0]).view(4, 1, 1, 1) * largest / weights.abs().amax()
    weights = weights.to(dtype)
    found = rounded(weights, steps)
    assert found.dtype == dtype
    assert torch.equal(rounded(found, steps), found), "once is enough"
    # The step is a power of two, hence up to twice the largest by the steps, and never finer than float16 can be.
    step = (2 * weights.float().flatten(1).abs().amax(1) / steps).clamp(min=2.0**-24)
    assert ((found.float() - weights.float()).abs().flatten(1).amax(1) <= step / 2).all()
    assert all(len(channel.unique()) <= 2 * steps + 1 for channel in found)


def test_rounded_weights_are_packed_to_less_than_three_quarters() -> None:
    weights = torch.randn(64, 64, 3, 3, generator=torch.Generator().manual_seed(1)).half()
    before, after = (len(zlib.compress(each.numpy().tobytes())) for each in (weights, rounded(weights, 128)))
    assert after < 0.75 * before


def test_biases_and_the_statistics_of_batches_are_not_rounded() -> None:
    assert rounded(vector := torch.randn(50), 128) is vector
    assert rounded(count := torch.tensor(3), 128) is count


# Average precision


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


def test_a_class_that_is_not_there_has_no_average_precision() -> None:
    assert np.isnan(average_precision([TRUE], [_boxes((0, 0, 9, 9, 1, 1))], 1))


# The shipped weights


def _expected() -> Any:
    return json.loads((sample.IMAGES / "expected.json").read_text())


def _quality() -> Any:
    return json.loads((DIRECTORY / "quality.json").read_text())


def test_the_files_are_small_half_precision_and_say_what_they_are() -> None:
    files = [DIRECTORY / f"{name}.safetensors" for name in ("resnet50", "yolov8n")]
    assert sum(file.stat().st_size for file in files) < 60_000_000
    for file in files:
        with safe_open(file, "pt") as tensors:
            metadata = tensors.metadata()
            assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.float16, torch.int64}  # noqa: SIM118
        assert metadata["architecture"] == file.stem
        assert tuple(json.loads(metadata["labels"])) == KINDS


@pytest.mark.parametrize("name", ["resnet50", "yolov8n"])
def test_the_shipped_weights_are_rounded_as_training_rounds_them(name: str) -> None:
    state = load_file(DIRECTORY / f"{name}.safetensors")
    assert all(torch.equal(rounded(tensor, RECIPES[name].steps), tensor) for tensor in state.values())


def test_quality_is_good_on_enough_images_that_no_training_saw() -> None:
    quality = _quality()
    assert quality["resnet50"]["images"] >= 1000
    assert quality["resnet50"]["top1"] >= 0.97
    assert quality["yolov8n"]["images"] >= 300
    assert quality["yolov8n"]["map50"] >= 0.90
    for record in quality.values():
        assert record["image_seed"] != record["training_seed"]
