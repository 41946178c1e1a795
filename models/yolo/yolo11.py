"""YOLO11 networks, sizes n to x, for every task, with the state dicts of the published checkpoints.

Owns: the layers that YOLOv8 does not have (C3k2, C2PSA, branches of depthwise convolutions) and their order. Heads and
decoding are those of models.yolo.yolov8 and models.yolo.tasks. Must not know images, files or thresholds.

The layers are described in "YOLOv11: An Overview of the Key Architectural Enhancements" (arXiv 2410.17725). The
description in every checkpoint has their numbers, widths and repetitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from models.yolo.tasks import ClassifierYOLO, InstanceYOLOv8
from models.yolo.yolov8 import SIZES, SPPF, Bottleneck, Channels, Conv, CrossStage, Scale, Size, YOLOv8

_SCALES: dict[Size, Scale] = {
    "n": Scale(0.5, 0.25, 1024),
    "s": Scale(0.5, 0.50, 1024),
    "m": Scale(0.5, 1.00, 512),
    "l": Scale(1.0, 1.00, 512),
    "x": Scale(1.0, 1.50, 512),
}
_REPEATS = 2  # Repetitions in every block, at full depth.
_HEAD_CHANNELS = 64  # Channels of one head of attention.


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
        """Transform float [n, channels, h, w], keeping the shape."""
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
        """Transform float [n, channels, h, w], keeping the shape."""
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
        """Transform float [n, channels, h, w], keeping the shape."""
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
        """Transform float [n, channels, h, w], keeping the shape."""
        around, through = self.cv1(x).chunk(2, dim=1)
        y: Tensor = self.cv2(torch.cat((around, self.m(through)), dim=1))
        return y


class YOLO11(YOLOv8):
    """YOLO11's detector, and the trunk of its other networks."""

    scales: ClassVar[Mapping[Size, Scale]] = _SCALES
    head_layer: ClassVar[int] = 23

    @staticmethod
    def class_branch(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
        """Build a class branch: twice a depthwise 3x3 convolution and a 1x1 one, then a 1x1 one."""
        return nn.Sequential(
            nn.Sequential(Conv(inputs, inputs, 3, groups=inputs), Conv(inputs, hidden)),
            nn.Sequential(Conv(hidden, hidden, 3, groups=hidden), Conv(hidden, hidden)),
            nn.Conv2d(hidden, outputs, 1),
        )

    @staticmethod
    def backbone(scale: Scale) -> dict[str, nn.Module]:
        """Build layers 0 to 8."""
        c1, c2, c3, c4, c5 = scale.channels
        depth, is_deep = round(_REPEATS * scale.depth), _is_deep(scale)
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
        """Build layers by their published numbers; return them and the channels of the result of `features`."""
        _, _, c3, c4, c5 = scale.channels
        depth, is_deep = round(_REPEATS * scale.depth), _is_deep(scale)
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


class InstanceYOLO11(YOLO11, InstanceYOLOv8):
    """YOLO11 for masks, poses or turned boxes."""


def classifier(size: Size, class_count: int) -> nn.Module:
    """Build the backbone of YOLO11 and its attention, with a head of classes."""
    scale = _SCALES[size]
    attention = C2PSA(scale.channels[-1], round(_REPEATS * scale.depth))
    return ClassifierYOLO([*YOLO11.backbone(scale).values(), attention], scale.channels[-1], class_count)


def size_of(state: Mapping[str, Tensor]) -> Size | None:
    """Return the size whose first convolution and first block a state dict has, None if it has those of no size.

    m and l are equally wide; l has two bottlenecks in a block.
    """
    stem = state.get("model.0.conv.weight")
    if stem is None or stem.ndim == 0:
        return None
    depth = 1.0 if "model.2.m.1.cv1.conv.weight" in state else 0.5
    return next(
        (size for size in SIZES if _SCALES[size].depth == depth and int(64 * _SCALES[size].width) == len(stem)), None
    )


def _is_deep(scale: Scale) -> bool:
    """Return True if all blocks are of C3k: from size m on."""
    return scale.width >= 1
