"""Detection as the reference does it, and the same answers from what exporters and engines make of the network."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torchvision.ops import box_iou

from models.contract.model import Options, Placement
from models.yolo.model import YOLO
from models.yolo.yolov8 import BOX_CHANNELS, YOLOv8
from tests.support import reference_yolov8
from tests.support.networks import letterboxed
from tests.support.photographs import PHOTOGRAPHS

LABELS = tuple(f"class {index}" for index in range(12))


RANDOM = YOLO.of("random", "yolov8n", LABELS, "random", None)


needs_photographs = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("sklearn", "ultralytics")),
    reason="the photographs come with scikit-learn and ultralytics",
)


def matched(detections: list[dict[str, Any]], reference: tuple[Any, Any, Any]) -> tuple[float, float]:
    """Every box has its own partner of the same class: the lowest IoU, the largest score difference."""
    boxes, scores, classes = (torch.from_numpy(array) for array in reference)
    ours = torch.tensor([list(detection["box"].values()) for detection in detections])
    assert len(ours) == len(boxes)
    overlap = box_iou(ours, boxes)
    overlap[torch.tensor([d["class_id"] for d in detections])[:, None] != classes[None]] = 0
    best, partner = overlap.max(dim=1)
    assert len(partner.unique()) == len(boxes)
    difference = torch.tensor([detection["score"] for detection in detections]) - scores[partner]
    return float(best.min()), float(difference.abs().max())


def outputs_and_placements(
    detector: YOLO, images: list[npt.NDArray[np.uint8]]
) -> tuple[list[npt.NDArray[Any]], list[Placement]]:
    placed = [letterboxed(detector, image) for image in images]
    with torch.inference_mode():
        outputs = detector.network()(torch.stack([pixels for pixels, _ in placed]))
    return [tensor.numpy() for tensor in outputs], [placement for _, placement in placed]


def write_lively_weights(file: Path, pixels: Tensor) -> None:
    """Random weights whose BatchNorm suits these images, with scores that are not all at one end."""
    core = YOLOv8("n", len(LABELS))
    core.load_state_dict(reference_yolov8.perturbed(core.state_dict()))
    for module in core.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    state = core.state_dict()
    with torch.no_grad():
        inputs = pixels.permute(0, 3, 1, 2) / 255
        core.train().raw(inputs)
        for level, raw in enumerate(core.eval().raw(inputs)):
            # In place: the state dict shares its tensors with the network.
            state[f"model.22.cv3.{level}.2.bias"] -= raw[:, BOX_CHANNELS:].amax(dim=1).mean() + 2
    save_file(state, file)


def threshold_without_ties(detector: YOLO, outputs: list[npt.NDArray[Any]], index: int, placement: Placement) -> float:
    """Return a threshold of about 150 candidates that is well between two scores, and above which no two boxes of a
    class overlap as much as the limit of suppression, within rounding: there the last digit would decide.
    """
    best = np.sort(outputs[1][index])[::-1]
    limit = Options().iou_threshold
    for at in sorted(range(120, 160), key=lambda each: best[each + 1] - best[each]):
        options = Options(score_threshold=float(best[at] + best[at + 1]) / 2, iou_threshold=1)
        found = detector.postprocess(detector.reduce(outputs, index, options), placement, options)["detections"]
        boxes = torch.tensor([list(each["box"].values()) for each in found])
        classes = torch.tensor([each["class_id"] for each in found])
        tied = ((box_iou(boxes, boxes) - limit).abs() < 1e-4) & (classes[:, None] == classes)
        if not tied.any():
            return options.score_threshold
    raise AssertionError("two boxes overlap as much as the limit of suppression: choose other weights")


@needs_photographs
def test_predictions_on_photographs_are_those_of_the_reference(tmp_path: Path) -> None:
    images = [read() for read in PHOTOGRAPHS.values()]
    file = tmp_path / "lively.safetensors"
    write_lively_weights(file, torch.stack([letterboxed(RANDOM, image)[0] for image in images]))
    detector = YOLO.of("lively", "yolov8n", LABELS, file.name, str(file))
    outputs, placements = outputs_and_placements(detector, images)
    thresholds = [threshold_without_ties(detector, outputs, *each) for each in enumerate(placements)]
    expected = reference_yolov8.predictions(tmp_path / "found.npz", file, len(LABELS), images, thresholds)
    for index, (theirs, placement) in enumerate(zip(expected, placements, strict=True)):
        options = Options(score_threshold=thresholds[index])
        found = detector.postprocess(detector.reduce(outputs, index, options), placement, options)["detections"]
        assert 5 <= len(theirs[0]) <= 200
        iou, difference = matched(found, theirs)
        assert iou >= 0.99
        assert difference <= 1e-3
