"""YOLO26 networks, sizes n to x, that detect or find masks, poses and turned boxes; state dicts of the published files.

Owns: the differences from YOLO11: attention in the last block, distances without bins, prototypes of all strides, key
points and angles without decoding. Of the two heads in a file this is the one whose boxes are suppressed afterwards, as
the publisher's own package predicts by default (ultralytics 8.4.142 and later); the other one is left out. Classifiers
of YOLO26 are those of YOLO11. Must not know images, files or thresholds.

The description in every checkpoint has the numbers of layers, widths and repetitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from models.yolo import yolo11
from models.yolo.tasks import ExtraHead, InstanceYOLOv8, Prototypes, SegmentHead
from models.yolo.yolo11 import YOLO11, C3k2, PSABlock
from models.yolo.yolov8 import SPPF, Bottleneck, Branch, Channels, Conv, CrossStage, Scale, Size, by_anchor, doubled

UNUSED = ("model.23.one2one_", "model.23.proto.semseg.", "model.23.flow_model.", "model.23.cv4_sigma.")
"""Beginnings of names of the other head, and of tensors that only training uses."""


class ResidualSPPF(SPPF):
    """SPPF with a residual connection, and no activation before the pools."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.cv1 = Conv(channels, channels // 2, is_linear=True)

    def forward(self, x: Tensor) -> Tensor:
        """Transform float [n, channels, h, w], keeping the shape."""
        return super().forward(x) + x


class YOLO26(YOLO11):
    """YOLO26's detector, and the trunk of its other networks."""

    bins: ClassVar[int] = 1

    @classmethod
    def trunk(cls, scale: Scale) -> tuple[dict[str, nn.Module], Channels]:
        """Build layers by their published numbers; return them and the channels of the result of `features`."""
        layers, (c3, c4, c5) = super().trunk(scale)
        depth, half = round(2 * scale.depth), c5 // 2
        layers |= {
            "9": ResidualSPPF(c5),
            "13": C3k2(c5 + c4, c4, depth, True),
            "16": C3k2(c4 + c4, c3, depth, True),
            "19": C3k2(c3 + c4, c4, depth, True),
            "22": CrossStage(c4 + c5, c5, half, [nn.Sequential(Bottleneck(half, True, half // 2), PSABlock(half))]),
        }
        return layers, (c3, c4, c5)


class PrototypesOfAll(Prototypes):
    """Prototypes from the features of all strides."""

    def __init__(self, channels: Channels, hidden: int) -> None:
        super().__init__(hidden, hidden)
        self.feat_refine = nn.ModuleList(Conv(each, channels[0]) for each in channels[1:])
        self.feat_fuse = Conv(channels[0], hidden, 3)

    def of(self, features: list[Tensor]) -> Tensor:
        """Compute float [n, 32, h / 4, w / 4] from the features of strides 8, 16 and 32."""
        p4, p5 = (layer(each) for layer, each in zip(self.feat_refine, features[1:], strict=True))
        return self.forward(self.feat_fuse(features[0] + doubled(p4) + doubled(doubled(p5))))


class SegmentHead26(SegmentHead):
    """Coefficients of masks for each anchor, and prototypes of all strides."""

    proto: PrototypesOfAll

    def made_prototypes(self, channels: Channels, hidden: int) -> Prototypes:
        """Build the layers of prototypes."""
        return PrototypesOfAll(channels, hidden)

    def prototypes(self, features: list[Tensor]) -> Tensor:
        """Compute prototypes, float32 [n, 32, h / 4, w / 4]."""
        return self.proto.of(features).float()


class PoseHead26(ExtraHead):
    """Head whose key points of each anchor come from a layer of their own (`cv4_kpts`).

    The branch before it is as wide as training wants it, which adds two deviations to the values of each key point.
    """

    def __init__(
        self, channels: Channels, class_count: int, class_branch: Branch, bins: int, *, keypoints: tuple[int, int]
    ) -> None:
        number, values = keypoints
        super().__init__(channels, class_count, class_branch, bins, extras=number * (values + 2))
        hidden = max(channels[0] // 4, number * (values + 2))
        self.cv4 = nn.ModuleList(each[:2] for each in self.cv4 if isinstance(each, nn.Sequential))
        self.cv4_kpts = nn.ModuleList(nn.Conv2d(hidden, number * values, 1) for _ in channels)

    def extras(self, features: list[Tensor]) -> Tensor:
        """Compute the layer's output, float32 [n, anchors, extras]."""
        layers = zip(self.cv4, self.cv4_kpts, features, strict=True)
        return by_anchor([last(branch(x)) for branch, last, x in layers]).float()


class InstanceYOLO26(YOLO26, InstanceYOLOv8):
    """YOLO26 for masks, poses or turned boxes."""

    segment_head: ClassVar[Callable[..., SegmentHead]] = SegmentHead26

    @staticmethod
    def pose_head(keypoints: tuple[int, int]) -> Callable[..., ExtraHead]:
        """Return the constructor of a head with so many key points, of so many values each."""
        return partial(PoseHead26, keypoints=keypoints)

    def angle(self, said: Tensor) -> Tensor:
        """Return the angle itself."""
        return said

    def places(self, said: Tensor, centres: Tensor) -> Tensor:
        """Compute key points from the anchors' centres."""
        return said + centres


def size_of(state: Mapping[str, Tensor]) -> Size | None:
    """Return the size of a state dict, None if it is of no size, or of a network with bins, as YOLO11 is."""
    box = state.get("model.23.cv2.0.2.bias")
    return yolo11.size_of(state) if box is not None and box.shape == (4,) else None
