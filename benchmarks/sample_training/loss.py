"""Training loss of the detector, written from the papers it names.

Owns: the anchors that answer for each object, and the cost of their answers. Must not know images, optimisers or
layers; of the network it knows the result of `raw`.

Papers: task-aligned assignment, TOOD (arXiv 2108.07755); complete IoU (arXiv 1911.08287); distribution focal loss,
Generalized Focal Loss (arXiv 2006.04388); the weights of the three terms, PP-YOLOE (arXiv 2203.16250).
"""

from __future__ import annotations

from math import pi
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.yolo.yolov8 import BINS, anchors

ALPHA = 1.0  # TOOD, section 3.2: alignment = score ** alpha * IoU ** beta
BETA = 6.0
TOP_K = 13
_CLASS_WEIGHT, _IOU_WEIGHT, _BINS_WEIGHT = 1.0, 2.5, 0.5


class Objects(NamedTuple):
    """True objects of a batch, padded to the image with the most objects.

    `boxes` float32 [n, m, 4] as x1, y1, x2, y2 in input pixels, `classes` int64 [n, m], `valid` bool [n, m]: False is
    padding.
    """

    boxes: Tensor
    classes: Tensor
    valid: Tensor


class Assignment(NamedTuple):
    """Wanted answer of each anchor: `positive` bool [n, a], `owner` int64 [n, a] (an object's number where positive),
    `quality` float32 [n, a] in 0..1 (the class score to give, 0 where not positive)."""

    positive: Tensor
    owner: Tensor
    quality: Tensor


def detection_loss(outputs: list[Tensor], objects: Objects, size: tuple[int, int]) -> Tensor:
    """Compute the loss of a batch, a float32 scalar.

    `outputs`: result of `YOLOv8.raw` for images of `size` (height, width), in pixels.
    """
    rows = torch.cat([level.permute(0, 2, 3, 1).flatten(1, 2) for level in outputs], dim=1).float()
    bins, logits = rows[..., : 4 * BINS].reshape(*rows.shape[:2], 4, BINS), rows[..., 4 * BINS :]
    centres, strides = anchors(*size)
    strides = strides.unsqueeze(1)
    distances = (bins.softmax(dim=3) * torch.arange(BINS)).sum(dim=3)
    boxes = torch.cat((centres - distances[..., :2], centres + distances[..., 2:]), dim=2) * strides

    assignment = assign(logits.detach().sigmoid(), boxes.detach(), centres * strides, objects)
    positive, quality = assignment.positive, assignment.quality
    image = torch.arange(len(rows)).unsqueeze(1).expand_as(positive)[positive]
    owner = assignment.owner[positive]
    wanted_boxes = objects.boxes[image, owner]
    weights = quality[positive]
    total = quality.sum().clamp(min=1.0)

    wanted_scores = torch.zeros_like(logits)
    wanted_scores[positive, objects.classes[image, owner]] = weights
    class_loss = functional.binary_cross_entropy_with_logits(logits, wanted_scores, reduction="sum")
    iou_loss = ((1 - complete_iou(boxes[positive], wanted_boxes)) * weights).sum()

    centre, stride = centres.expand(len(rows), -1, 2)[positive], strides.expand(len(rows), -1, 1)[positive]
    wanted_distances = torch.cat((centre - wanted_boxes[:, :2] / stride, wanted_boxes[:, 2:] / stride - centre), dim=1)
    bins_loss = (distribution_focal_loss(bins[positive], wanted_distances) * weights).sum()
    return (_CLASS_WEIGHT * class_loss + _IOU_WEIGHT * iou_loss + _BINS_WEIGHT * bins_loss) / total


def assign(scores: Tensor, boxes: Tensor, centres: Tensor, objects: Objects) -> Assignment:
    """Choose for every object the anchors inside it that already agree best with it, by class and place (TOOD).

    `scores`: class probabilities [n, a, classes]; `boxes`: predicted, [n, a, 4], and `centres`: the anchors', [a, 2],
    both in input pixels. An anchor that two objects want goes to the one that its box overlaps more.
    """
    left_top, right_bottom = objects.boxes[:, :, None, :2], objects.boxes[:, :, None, 2:]
    inside = ((centres > left_top) & (centres < right_bottom)).all(dim=3) & objects.valid.unsqueeze(2)
    overlaps = iou(objects.boxes.unsqueeze(2), boxes.unsqueeze(1)) * inside
    index = objects.classes.unsqueeze(1).expand(-1, scores.shape[1], -1)
    alignment = scores.gather(2, index).transpose(1, 2).pow(ALPHA) * overlaps.pow(BETA)

    best = alignment.masked_fill(~inside, -1.0).topk(min(TOP_K, alignment.shape[2]), dim=2).indices
    chosen = torch.zeros_like(inside).scatter(2, best, True) & inside
    owner = overlaps.masked_fill(~chosen, -1.0).argmax(dim=1)
    chosen &= functional.one_hot(owner, chosen.shape[1]).transpose(1, 2).bool()

    # Scaled so that an object's best anchor must answer its IoU: confident where it is also well placed.
    alignment = alignment * chosen
    highest_overlap = (overlaps * chosen).amax(dim=2, keepdim=True)
    quality = alignment / alignment.amax(dim=2, keepdim=True).clamp(min=1e-30) * highest_overlap
    return Assignment(chosen.any(dim=1), owner, quality.sum(dim=1))


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Compute intersection over union of boxes [..., 4] (x1, y1, x2, y2) that broadcast against each other."""
    left_top = torch.maximum(first[..., :2], second[..., :2])
    right_bottom = torch.minimum(first[..., 2:], second[..., 2:])
    common = (right_bottom - left_top).clamp(min=0).prod(dim=-1)
    areas = [(box[..., 2:] - box[..., :2]).clamp(min=0).prod(dim=-1) for box in (first, second)]
    return common / (areas[0] + areas[1] - common).clamp(min=1e-9)


def complete_iou(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Compute IoU less a penalty for centres apart and other shapes (arXiv 1911.08287), of boxes [k, 4]; 1 at best."""
    overlap = iou(predicted, wanted)
    hull = torch.maximum(predicted[:, 2:], wanted[:, 2:]) - torch.minimum(predicted[:, :2], wanted[:, :2])
    apart = (predicted[:, :2] + predicted[:, 2:] - wanted[:, :2] - wanted[:, 2:]) / 2
    distance = apart.square().sum(dim=1) / hull.square().sum(dim=1).clamp(min=1e-9)
    angles = [torch.atan2(box[:, 2] - box[:, 0], box[:, 3] - box[:, 1]) for box in (predicted, wanted)]
    shape = 4 / pi**2 * (angles[0] - angles[1]).square()
    with torch.no_grad():
        balance = shape / (1 - overlap + shape).clamp(min=1e-9)
    return overlap - distance - balance * shape


def distribution_focal_loss(bins: Tensor, distances: Tensor) -> Tensor:
    """Compute cross-entropy to the two bins beside each true distance (arXiv 2006.04388), mean of four sides.

    `bins`: logits [k, 4, 16]; `distances`: in strides, [k, 4], beyond the last bin cut off. Returns [k].
    """
    distances = distances.clamp(0, BINS - 1.01)
    lower = distances.long()
    share = distances - lower
    surprise = -bins.log_softmax(dim=2)
    at_lower = surprise.gather(2, lower.unsqueeze(2)).squeeze(2)
    at_upper = surprise.gather(2, (lower + 1).unsqueeze(2)).squeeze(2)
    return (at_lower * (1 - share) + at_upper * share).mean(dim=1)
