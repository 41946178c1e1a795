"""YOLO11 and YOLO26 networks, sizes n to x, for every task, with the state dicts of the published checkpoints.

Owns: the layers that YOLOv8 does not have and their order. Heads and decoding are those of models.yolo.yolov8. Must not
know images, files or thresholds.

YOLO11's layers (C3k2, C2PSA, branches of depthwise convolutions) are described in "YOLOv11: An Overview of the Key
Architectural Enhancements" (arXiv 2410.17725). YOLO26 differs in the attention in its last block, distances without
bins, prototypes of all strides, key points and angles without decoding. Of the two heads in a file of YOLO26 this is
the one whose boxes are suppressed afterwards, as the publisher's own package predicts by default (ultralytics 8.4.142
and later); the other one is left out. Classifiers of YOLO26 are those of YOLO11. The description in every checkpoint
has the numbers of layers, widths and repetitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from models.yolo.yolov8 import (
    SPPF,
    Bottleneck,
    Branch,
    Channels,
    ClassifierYOLO,
    Conv,
    CrossStage,
    ExtraHead,
    InstanceYOLOv8,
    Prototypes,
    Scale,
    SegmentHead,
    Size,
    YOLOv8,
    by_anchor,
    doubled,
)

_REPEATS = 2  # Repetitions in every block, at full depth.
_HEAD_CHANNELS = 64  # Channels of one head of attention.
_DEEP_FROM = 1  # Least width, that of size m, from which on all blocks are of C3k.


class C3k(nn.Module):
    """Cross-stage partial block: half of the channels pass two bottlenecks, the other half bypasses them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.cv1 = Conv(channels, half)
        self.cv2 = Conv(channels, half)
        self.cv3 = Conv(2 * half, channels)
        self.m = nn.Sequential(Bottleneck(half, True), Bottleneck(half, True))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), dim=1))
        return y


class C3k2(CrossStage):
    """A cross-stage block, of `share` of the outputs; each step is a narrow bottleneck or, if `is_deep`, a C3k."""

    def __init__(self, inputs: int, outputs: int, depth: int, is_deep: bool, share: float = 0.5) -> None:
        part = int(outputs * share)
        steps = [C3k(part) if is_deep else Bottleneck(part, True, part // 2) for _ in range(depth)]
        super().__init__(inputs, outputs, part, steps)


class Attention(nn.Module):
    """Self-attention of all places of an image; a depthwise convolution of the values encodes their positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = channels // _HEAD_CHANNELS
        self.key = channels // self.heads // 2
        self.qkv = Conv(channels, channels + 2 * self.key * self.heads, is_linear=True)
        self.proj = Conv(channels, channels, is_linear=True)
        self.pe = Conv(channels, channels, 3, groups=channels, is_linear=True)

    def forward(self, x: Tensor) -> Tensor:
        n, channels, h, w = x.shape
        mixed = self.qkv(x).reshape(n, self.heads, 2 * self.key + channels // self.heads, h * w)
        query, key, value = mixed.split((self.key, self.key, channels // self.heads), dim=2)
        weights = (query.transpose(2, 3) @ key * self.key**-0.5).softmax(dim=3)
        seen = (value @ weights.transpose(2, 3)).reshape(n, channels, h, w)
        y: Tensor = self.proj(seen + self.pe(value.reshape(n, channels, h, w)))
        return y


class PSABlock(nn.Module):
    """Attention and two 1x1 convolutions, each with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attn = Attention(channels)
        self.ffn = nn.Sequential(Conv(channels, 2 * channels), Conv(2 * channels, channels, is_linear=True))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        y: Tensor = x + self.ffn(x)
        return y


class C2PSA(nn.Module):
    """Attention block: half of the channels pass `depth` blocks of attention, the other half bypasses them."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.cv1 = Conv(channels, channels)
        self.cv2 = Conv(channels, channels)
        self.m = nn.Sequential(*(PSABlock(channels // 2) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        around, through = self.cv1(x).chunk(2, dim=1)
        y: Tensor = self.cv2(torch.cat((around, self.m(through)), dim=1))
        return y


class YOLO11(YOLOv8):
    """YOLO11's detector, and the trunk of its other networks."""

    scales: ClassVar[Mapping[Size, Scale]] = {
        "n": Scale(0.5, 0.25, 1024),
        "s": Scale(0.5, 0.50, 1024),
        "m": Scale(0.5, 1.00, 512),
        "l": Scale(1.0, 1.00, 512),
        "x": Scale(1.0, 1.50, 512),
    }
    head_layer: ClassVar[int] = 23
    classifier_layer: ClassVar[int] = 10

    @staticmethod
    def class_branch(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
        # Twice a depthwise 3x3 convolution and a 1x1 one, then a 1x1 one.
        return nn.Sequential(
            nn.Sequential(Conv(inputs, inputs, 3, groups=inputs), Conv(inputs, hidden)),
            nn.Sequential(Conv(hidden, hidden, 3, groups=hidden), Conv(hidden, hidden)),
            nn.Conv2d(hidden, outputs, 1),
        )

    @staticmethod
    def backbone(scale: Scale) -> dict[str, nn.Module]:
        c1, c2, c3, c4, c5 = scale.channels
        depth, is_deep = round(_REPEATS * scale.depth), scale.width >= _DEEP_FROM
        return {
            "0": Conv(3, c1, 3, 2),
            "1": Conv(c1, c2, 3, 2),
            "2": C3k2(c2, c3, depth, is_deep, 0.25),
            "3": Conv(c3, c3, 3, 2),
            "4": C3k2(c3, c4, depth, is_deep, 0.25),
            "5": Conv(c4, c4, 3, 2),
            "6": C3k2(c4, c4, depth, True),
            "7": Conv(c4, c5, 3, 2),
            "8": C3k2(c5, c5, depth, True),
        }

    @classmethod
    def trunk(cls, scale: Scale) -> tuple[dict[str, nn.Module], Channels]:
        _, _, c3, c4, c5 = scale.channels
        depth, is_deep = round(_REPEATS * scale.depth), scale.width >= _DEEP_FROM
        layers = {
            **cls.backbone(scale),
            "9": SPPF(c5),
            "10": C2PSA(c5, depth),
            "13": C3k2(c5 + c4, c4, depth, is_deep),
            "16": C3k2(c4 + c4, c3, depth, is_deep),
            "17": Conv(c3, c3, 3, 2),
            "19": C3k2(c3 + c4, c4, depth, is_deep),
            "20": Conv(c4, c4, 3, 2),
            "22": C3k2(c4 + c5, c5, depth, True),
        }
        return layers, (c3, c4, c5)

    @classmethod
    def classifier(cls, size: Size, class_count: int) -> nn.Module:
        scale = cls.scales[size]
        attention = C2PSA(scale.channels[-1], round(_REPEATS * scale.depth))
        return ClassifierYOLO([*cls.backbone(scale).values(), attention], scale.channels[-1], class_count)

    @classmethod
    def size_of(cls, state: Mapping[str, Tensor]) -> Size | None:
        """Return the size also by the first block: m and l are equally wide, and l has two bottlenecks in a block."""
        size, is_long = super().size_of(state), "model.2.m.1.cv1.conv.weight" in state
        size = "l" if size == "m" and is_long else size
        return size if size is not None and (cls.scales[size].depth == 1) == is_long else None


class InstanceYOLO11(YOLO11, InstanceYOLOv8):
    """YOLO11 for masks, poses or turned boxes."""


class ResidualSPPF(SPPF):
    """SPPF with a residual connection, and no activation before the pools."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.cv1 = Conv(channels, channels // 2, is_linear=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class YOLO26(YOLO11):
    """YOLO26's detector, and the trunk of its other networks."""

    bins: ClassVar[int] = 1
    # The other head, and tensors that only training uses.
    unused: ClassVar[tuple[str, ...]] = tuple(
        f"model.23.{name}" for name in ("one2one_", "proto.semseg.", "flow_model.", "cv4_sigma.")
    )

    @classmethod
    def trunk(cls, scale: Scale) -> tuple[dict[str, nn.Module], Channels]:
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

    @classmethod
    def size_of(cls, state: Mapping[str, Tensor]) -> Size | None:
        """Return None also for a network with bins, as YOLO11 is."""
        box = state.get("model.23.cv2.0.2.bias")
        return super().size_of(state) if box is not None and box.shape == (4,) else None


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
        return PrototypesOfAll(channels, hidden)

    def prototypes(self, features: list[Tensor]) -> Tensor:
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
        layers = zip(self.cv4, self.cv4_kpts, features, strict=True)
        return by_anchor([last(branch(x)) for branch, last, x in layers]).float()


class InstanceYOLO26(YOLO26, InstanceYOLOv8):
    """YOLO26 for masks, poses or turned boxes."""

    segment_head: ClassVar[Callable[..., SegmentHead]] = SegmentHead26

    @staticmethod
    def pose_head(keypoints: tuple[int, int]) -> Callable[..., ExtraHead]:
        return partial(PoseHead26, keypoints=keypoints)

    def angle(self, output: Tensor) -> Tensor:
        return output

    def places(self, output: Tensor, centres: Tensor) -> Tensor:
        return output + centres
