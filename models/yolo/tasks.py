"""YOLOv8 networks for masks, poses, turned boxes and classes: heads on the trunk of models.yolo.yolov8.

Owns: these heads, with the state dicts of the published `-seg`, `-pose`, `-obb` and `-cls` checkpoints, and decoding
their outputs into boxes, scores, classes and extras on the device. Must not know images, files or thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import pi
from typing import ClassVar

import torch
from torch import Tensor, nn

from models.yolo.yolov8 import BINS, Branch, Channels, Conv, DetectHead, Size, YOLOv8, anchors, branch, by_anchor

MASKS = 32
"""Prototypes of masks, and coefficients of each anchor."""
_CLASSIFIER_CHANNELS = 1280
_MOST_PROTOTYPE_CHANNELS = 256


class ExtraHead(DetectHead):
    """A detection head with a third branch (`cv4`): `extras` numbers of each anchor."""

    def __init__(
        self, channels: Channels, class_count: int, class_branch: Branch, bins: int = BINS, *, extras: int
    ) -> None:
        super().__init__(channels, class_count, class_branch, bins)
        hidden = max(channels[0] // 4, extras)
        self.cv4 = nn.ModuleList(branch(c, hidden, extras) for c in channels)

    def extras(self, features: list[Tensor]) -> Tensor:
        """Compute the branch's output, float32 [n, anchors, extras]."""
        return by_anchor([each(x) for each, x in zip(self.cv4, features, strict=True)]).float()


class Prototypes(nn.Module):
    """Basis of masks, from the features of stride 8, twice as large; each instance's mask is a weighted sum of it."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.cv1 = Conv(inputs, hidden, 3)
        self.upsample = nn.ConvTranspose2d(hidden, hidden, 2, 2)
        self.cv2 = Conv(hidden, hidden, 3)
        self.cv3 = Conv(hidden, MASKS)

    def forward(self, x: Tensor) -> Tensor:
        """Compute float [n, 32, 2 h, 2 w] from [n, inputs, h, w]."""
        y: Tensor = self.cv3(self.cv2(self.upsample(self.cv1(x))))
        return y


class SegmentHead(ExtraHead):
    """Coefficients of masks for each anchor, and the prototypes."""

    def __init__(
        self, channels: Channels, class_count: int, class_branch: Branch, bins: int = BINS, *, hidden: int
    ) -> None:
        super().__init__(channels, class_count, class_branch, bins, extras=MASKS)
        self.proto = self.made_prototypes(channels, hidden)

    def made_prototypes(self, channels: Channels, hidden: int) -> Prototypes:
        """Build the layers of prototypes."""
        return Prototypes(channels[0], hidden)

    def prototypes(self, features: list[Tensor]) -> Tensor:
        """Compute prototypes, float32 [n, 32, h / 4, w / 4]."""
        return self.proto(features[0]).float()  # type: ignore[no-any-return]


class InstanceYOLOv8(YOLOv8):
    """A detector whose anchors give more than a box. The result of `instances` is decoded, in float32.

    `kind`: `seg`, `pose` or `obb`; `keypoints`: of poses their number, and 2 values (x, y) or 3 (and visibility) each.
    """

    segment_head: ClassVar[Callable[..., SegmentHead]] = SegmentHead

    def __init__(self, size: Size, class_count: int, kind: str, keypoints: tuple[int, int] = (17, 3)) -> None:
        if kind == "seg":
            # The published files round it up to a multiple of 8.
            hidden = -(-int(_MOST_PROTOTYPE_CHANNELS * self.scales[size].width) // 8) * 8
            super().__init__(size, class_count, partial(self.segment_head, hidden=hidden))
        else:
            super().__init__(
                size, class_count, self.pose_head(keypoints) if kind == "pose" else partial(ExtraHead, extras=1)
            )
        self.kind, self.keypoints = kind, keypoints

    def instances(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute boxes [n, a, 4], scores [n, a], classes int32 [n, a], extras [n, a, e], and prototypes [n, m, h / 4,
        w / 4] of masks from float [n, 3, h, w] in 0..1.

        Boxes are x1, y1, x2, y2 in pixels of the input; of turned ones centre x, y, width and height.
        """
        features = self.features(x)
        head = self.head
        assert isinstance(head, ExtraHead)
        distances, logits = self.expected(head(features))
        centres, strides = (each.to(x.device) for each in anchors(x.shape[2], x.shape[3]))
        boxes, extras = self._decoded(distances, head.extras(features), centres, strides.unsqueeze(1))
        best, classes = logits.max(dim=2)
        found = (boxes, best.sigmoid(), classes.to(torch.int32), extras)
        return (*found, head.prototypes(features)) if isinstance(head, SegmentHead) else found

    def _decoded(self, distances: Tensor, extras: Tensor, centres: Tensor, strides: Tensor) -> tuple[Tensor, Tensor]:
        """Decode boxes and extras of anchors at `centres` [a, 2], in units of `strides` [a, 1].

        Extras of poses: key points in pixels of the input and their visibility in 0..1; of turned boxes: radians.
        """
        left_top, right_bottom = distances[..., :2], distances[..., 2:]
        if self.kind == "obb":
            angle = self.angle(extras)
            x, y = ((right_bottom - left_top) / 2).chunk(2, dim=2)
            cos, sin = angle.cos(), angle.sin()
            centre = torch.cat((x * cos - y * sin, x * sin + y * cos), dim=2) + centres
            return torch.cat((centre, left_top + right_bottom), dim=2) * strides, angle
        boxes = torch.cat((centres - left_top, centres + right_bottom), dim=2) * strides
        if self.kind == "pose":
            points = extras.reshape(*extras.shape[:2], *self.keypoints)
            places = self.places(points[..., :2], centres.unsqueeze(1)) * strides.unsqueeze(2)
            extras = torch.cat((places, points[..., 2:].sigmoid()), dim=3).flatten(2)
        return boxes, extras

    @staticmethod
    def pose_head(keypoints: tuple[int, int]) -> Callable[..., ExtraHead]:
        """Return the constructor of a head with so many key points, of so many values each."""
        return partial(ExtraHead, extras=keypoints[0] * keypoints[1])

    def angle(self, said: Tensor) -> Tensor:
        """Convert the branch's output to radians, from -pi/4 to 3 pi/4."""
        return (said.sigmoid() - 0.25) * pi

    def places(self, said: Tensor, centres: Tensor) -> Tensor:
        """Compute places from the branch's output for key points and the anchors' centres; all in strides."""
        return said * 2 + centres - 0.5


class ClassHead(nn.Module):
    """Mean of the last features, and a linear layer."""

    def __init__(self, channels: int, class_count: int) -> None:
        super().__init__()
        self.conv = Conv(channels, _CLASSIFIER_CHANNELS)
        self.linear = nn.Linear(_CLASSIFIER_CHANNELS, class_count)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [n, class_count] from float [n, channels, h, w]."""
        y: Tensor = self.linear(self.conv(x).mean(dim=(2, 3)))
        return y


class ClassifierYOLO(nn.Module):
    """A trunk without its pyramid and its pooling, with `channels` at its end, and a head of classes."""

    def __init__(self, trunk: Sequence[nn.Module], channels: int, class_count: int) -> None:
        super().__init__()
        self.model = nn.Sequential(*trunk, ClassHead(channels, class_count))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 1e-5  # PyTorch's default, with which classifiers, not detectors, are published.

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [n, class_count] from float [n, 3, h, w] in 0..1."""
        y: Tensor = self.model(x)
        return y


def classifier(size: Size, class_count: int) -> nn.Module:
    """Build the backbone of YOLOv8 with a head of classes. No size of a classifier has its last layers narrowed."""
    scale = YOLOv8.scales[size]._replace(max_channels=1024)
    return ClassifierYOLO([*YOLOv8.backbone(scale).values()], scale.channels[-1], class_count)
