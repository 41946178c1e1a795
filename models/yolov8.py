"""YOLOv8 networks, sizes n to x, whose state dicts are those of the published checkpoints.

Owns: the layers, their initial values, the fusion of BatchNorm and the decoding of the head. Must not know
images, files, thresholds or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

Size = Literal["n", "s", "m", "l", "x"]
SIZES: tuple[Size, ...] = ("n", "s", "m", "l", "x")

STRIDES = (8, 16, 32)
BINS = 16  # a side's distance from the anchor is a distribution over 0..15 strides
BOX_CHANNELS = 4 * BINS


class Scale(NamedTuple):
    """Factors of a size: of the number of blocks, of channels, and the most channels before that factor."""

    depth: float
    width: float
    max_channels: int


_SCALES: dict[Size, Scale] = {
    "n": Scale(1 / 3, 0.25, 1024),
    "s": Scale(1 / 3, 0.50, 1024),
    "m": Scale(2 / 3, 0.75, 768),
    "l": Scale(1.0, 1.00, 512),
    "x": Scale(1.0, 1.25, 512),
}


class Conv(nn.Module):
    """Convolution, BatchNorm, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """float [n, inputs, h, w] -> [n, outputs, h / stride, w / stride]."""
        y: Tensor = self.act(self.bn(self.conv(x)))
        return y

    def fuse(self) -> None:
        """Fold BatchNorm into the convolution; idempotent."""
        if isinstance(self.bn, nn.BatchNorm2d):
            conv, norm = self.conv, self.bn
            assert norm.running_mean is not None
            assert norm.running_var is not None
            conv.weight, conv.bias = fuse_conv_bn_weights(
                *(conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
            )
            self.bn = nn.Identity()


class Bottleneck(nn.Module):
    """Two 3x3 convolutions, with a residual connection in the backbone."""

    def __init__(self, channels: int, residual: bool) -> None:
        super().__init__()
        self.cv1 = Conv(channels, channels, 3)
        self.cv2 = Conv(channels, channels, 3)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """float [n, channels, h, w] -> the same shape."""
        y: Tensor = self.cv2(self.cv1(x))
        return x + y if self.residual else y


class C2f(nn.Module):
    """Cross-stage partial block: half of the channels pass `depth` bottlenecks, every step is kept."""

    def __init__(self, inputs: int, outputs: int, depth: int, residual: bool = False) -> None:
        super().__init__()
        half = outputs // 2
        self.cv1 = Conv(inputs, outputs)
        self.cv2 = Conv((2 + depth) * half, outputs)
        self.m = nn.ModuleList(Bottleneck(half, residual) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """float [n, inputs, h, w] -> [n, outputs, h, w]."""
        parts = list(self.cv1(x).chunk(2, dim=1))
        for bottleneck in self.m:
            parts.append(bottleneck(parts[-1]))
        y: Tensor = self.cv2(torch.cat(parts, dim=1))
        return y


class SPPF(nn.Module):
    """Spatial pyramid pooling: three 5x5 max pools in a row see 5, 9 and 13 pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1 = Conv(channels, channels // 2)
        self.cv2 = Conv(channels * 2, channels)
        self.m = nn.MaxPool2d(5, stride=1, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        """float [n, channels, h, w] -> the same shape."""
        parts = [self.cv1(x)]
        for _ in range(3):
            parts.append(self.m(parts[-1]))
        y: Tensor = self.cv2(torch.cat(parts, dim=1))
        return y


class _Expectation(nn.Module):
    """Holds the bin values 0..15 under the name the published state dicts give them; never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.copy_(torch.arange(BINS, dtype=torch.float32).view(1, BINS, 1, 1))


class Detect(nn.Module):
    """Decoupled anchor-free head: per stride a box branch (`cv2`) and a class branch (`cv3`)."""

    def __init__(self, channels: tuple[int, int, int], class_count: int) -> None:
        super().__init__()
        box = max(BOX_CHANNELS, channels[0] // 4)
        hidden = max(channels[0], min(class_count, 100))
        self.cv2 = nn.ModuleList(self.branch(c, box, BOX_CHANNELS) for c in channels)
        self.cv3 = nn.ModuleList(self.branch(c, hidden, class_count) for c in channels)
        self.dfl = _Expectation()
        for branch, stride in zip(self.cv3, STRIDES, strict=True):
            # A prior of five objects in a 640 x 640 image, so that training does not start with false alarms.
            nn.init.constant_(branch.get_parameter("2.bias"), log(5 / class_count / (640 / stride) ** 2))

    @staticmethod
    def branch(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
        """Two 3x3 convolutions and a 1x1 one."""
        return nn.Sequential(Conv(inputs, hidden, 3), Conv(hidden, hidden, 3), nn.Conv2d(hidden, outputs, 1))

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Per stride: box bins, then class logits, [n, 64 + class_count, h, w]."""
        return [
            torch.cat((box(x), classes(x)), dim=1) for box, classes, x in zip(self.cv2, self.cv3, features, strict=True)
        ]


class YOLOv8(nn.Module):
    """The whole network: backbone, feature pyramid, head. Inputs are RGB in 0..1, sides multiples of 32."""

    def __init__(
        self, size: Size, class_count: int, head: Callable[[tuple[int, int, int], int], Detect] = Detect
    ) -> None:
        """`head`: makes the head of the channels of strides 8, 16 and 32, and the number of classes."""
        super().__init__()
        scale = _SCALES[size]

        def channels(base: int) -> int:
            return int(min(base, scale.max_channels) * scale.width)

        def depth(base: int) -> int:
            return round(base * scale.depth)

        c1, c2, c3, c4, c5 = (channels(base) for base in (64, 128, 256, 512, 1024))
        self.class_count = class_count
        # Keyed by the published layer numbers; those missing (10, 11, 13, 14, 17, 20) have no weights.
        self.model = nn.ModuleDict(
            {
                "0": Conv(3, c1, 3, 2),
                "1": Conv(c1, c2, 3, 2),
                "2": C2f(c2, c2, depth(3), residual=True),
                "3": Conv(c2, c3, 3, 2),
                "4": C2f(c3, c3, depth(6), residual=True),
                "5": Conv(c3, c4, 3, 2),
                "6": C2f(c4, c4, depth(6), residual=True),
                "7": Conv(c4, c5, 3, 2),
                "8": C2f(c5, c5, depth(3), residual=True),
                "9": SPPF(c5),
                "12": C2f(c5 + c4, c4, depth(3)),
                "15": C2f(c4 + c3, c3, depth(3)),
                "16": Conv(c3, c3, 3, 2),
                "18": C2f(c3 + c4, c4, depth(3)),
                "19": Conv(c4, c4, 3, 2),
                "21": C2f(c4 + c5, c5, depth(3)),
                "22": head((c3, c4, c5), class_count),
            }
        )

    def features(self, x: Tensor) -> list[Tensor]:
        """float [n, 3, h, w] in 0..1 -> what the head takes for strides 8, 16, 32: [n, c, h / stride, w / stride]."""
        layer = self.model
        p3 = layer["4"](layer["3"](layer["2"](layer["1"](layer["0"](x)))))
        p4 = layer["6"](layer["5"](p3))
        p5 = layer["9"](layer["8"](layer["7"](p4)))
        up4 = layer["12"](torch.cat((_doubled(p5), p4), dim=1))
        out3 = layer["15"](torch.cat((_doubled(up4), p3), dim=1))
        out4 = layer["18"](torch.cat((layer["16"](out3), up4), dim=1))
        out5 = layer["21"](torch.cat((layer["19"](out4), p5), dim=1))
        return [out3, out4, out5]

    def raw(self, x: Tensor) -> list[Tensor]:
        """float [n, 3, h, w] in 0..1 -> for strides 8, 16, 32: [n, 64 + class_count, h / stride, w / stride].

        The first 64 channels are the bins of left, top, right, bottom (logits), the rest class logits.
        """
        outputs: list[Tensor] = self.model["22"](self.features(x))
        return outputs

    def distances_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float [n, 3, h, w] -> float32 distances [n, anchors, 4] and class logits [n, anchors, class_count].

        Distances are the expected left, top, right, bottom of the box from its anchor, in units of the stride.
        Anchors run row by row through stride 8, then 16, then 32, as in `anchors`.
        """
        return self.expected(self.raw(x))

    def expected(self, levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What `raw` returns -> what `distances_and_logits` does."""
        rows = by_anchor(levels).float()
        bins = rows[..., :BOX_CHANNELS].reshape(rows.shape[0], -1, 4, BINS)
        values = self.get_parameter("model.22.dfl.conv.weight").float().flatten()
        return (bins.softmax(dim=3) * values).sum(dim=3), rows[..., BOX_CHANNELS:]

    def forward(self, x: Tensor) -> Tensor:
        """float [n, 3, h, w] -> float32 [n, 4 + class_count, anchors].

        Rows are centre x, centre y, width, height in input pixels, then the class probabilities.
        """
        distances, logits = self.distances_and_logits(x)
        centres, strides = anchors(x.shape[2], x.shape[3])
        left_top, right_bottom = distances[..., :2], distances[..., 2:]
        centre = centres.to(x.device) + (right_bottom - left_top) / 2
        boxes = torch.cat((centre, left_top + right_bottom), dim=2) * strides.to(x.device).unsqueeze(1)
        return torch.cat((boxes, logits.sigmoid()), dim=2).transpose(1, 2)

    def fuse(self) -> YOLOv8:
        """Fold every BatchNorm into its convolution, in place; for inference only. Idempotent."""
        for module in self.modules():
            if isinstance(module, Conv):
                module.fuse()
        return self


def scale_of(size: Size) -> Scale:
    """Depth and width of a size."""
    return _SCALES[size]


def by_anchor(levels: list[Tensor]) -> Tensor:
    """[n, c, h, w] of each stride -> [n, anchors, c]."""
    return torch.cat([level.permute(0, 2, 3, 1).flatten(1, 2) for level in levels], dim=1)


def size_of(state: Mapping[str, Tensor]) -> Size | None:
    """The size whose first convolution a state dict has, None when it has that of no size."""
    stem = state.get("model.0.conv.weight")
    if stem is None or stem.ndim == 0:
        return None
    return next((size for size in SIZES if int(64 * _SCALES[size].width) == len(stem)), None)


def anchors(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Anchors of an input of this size in pixels.

    Centres float32 [anchors, 2] are (x, y) in units of the stride; strides float32 [anchors] are in pixels.
    """
    centres, strides = [], []
    for stride in STRIDES:
        rows, columns = height // stride, width // stride
        y, x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
        centres.append(torch.stack((x, y), dim=2).reshape(-1, 2))
        strides.append(torch.full((rows * columns,), float(stride)))
    return torch.cat(centres), torch.cat(strides)


def _doubled(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2.0, mode="nearest")
