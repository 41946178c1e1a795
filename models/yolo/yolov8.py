"""YOLOv8 networks, sizes n to x, with the state dicts of the published checkpoints.

Owns: the layers, their initial values, the fusion of BatchNorm and the decoding of the head. Must not know images,
files, thresholds or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

Size = Literal["n", "s", "m", "l", "x"]
Channels = tuple[int, int, int]
"""Channels of the features of strides 8, 16 and 32."""
Branch = Callable[[int, int, int], nn.Sequential]
"""Constructor of a head's branch from the channels of its input, within it, and of its output."""
SIZES: tuple[Size, ...] = ("n", "s", "m", "l", "x")

STRIDES = (8, 16, 32)
BINS = 16  # a side's distance from the anchor is a distribution over 0..15 strides
BOX_CHANNELS = 4 * BINS


class Scale(NamedTuple):
    """Factors of a size: of the number of blocks, of channels, and the most channels before that factor."""

    depth: float
    width: float
    max_channels: int

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels after each of the five layers that halve an image's sides."""
        return tuple(int(min(base, self.max_channels) * self.width) for base in (64, 128, 256, 512, 1024))


_SCALES: dict[Size, Scale] = {
    "n": Scale(1 / 3, 0.25, 1024),
    "s": Scale(1 / 3, 0.50, 1024),
    "m": Scale(2 / 3, 0.75, 768),
    "l": Scale(1.0, 1.00, 512),
    "x": Scale(1.0, 1.25, 512),
}


class Conv(nn.Module):
    """Convolution, BatchNorm, SiLU; `is_linear`: without SiLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, *, groups: int = 1, is_linear: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)
        self.act: nn.Module = nn.Identity() if is_linear else nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Compute [n, outputs, h / stride, w / stride] from float [n, inputs, h, w]."""
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
    """Two 3x3 convolutions with `hidden` channels between them (default: all), and a residual connection."""

    def __init__(self, channels: int, residual: bool, hidden: int | None = None) -> None:
        super().__init__()
        self.cv1 = Conv(channels, hidden or channels, 3)
        self.cv2 = Conv(hidden or channels, channels, 3)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """Transform float [n, channels, h, w], keeping the shape."""
        y: Tensor = self.cv2(self.cv1(x))
        return x + y if self.residual else y


class CrossStage(nn.Module):
    """Cross-stage partial block: one of two parts of the channels passes `steps`, and every step's output is kept."""

    def __init__(self, inputs: int, outputs: int, part: int, steps: Sequence[nn.Module]) -> None:
        super().__init__()
        self.cv1 = Conv(inputs, 2 * part)
        self.cv2 = Conv((2 + len(steps)) * part, outputs)
        self.m = nn.ModuleList(steps)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [n, outputs, h, w] from float [n, inputs, h, w]."""
        parts = list(self.cv1(x).chunk(2, dim=1))
        for step in self.m:
            parts.append(step(parts[-1]))
        y: Tensor = self.cv2(torch.cat(parts, dim=1))
        return y


class C2f(CrossStage):
    """A cross-stage block, of half of the channels, with `depth` bottlenecks."""

    def __init__(self, inputs: int, outputs: int, depth: int, residual: bool = False) -> None:
        half = outputs // 2
        super().__init__(inputs, outputs, half, [Bottleneck(half, residual) for _ in range(depth)])


class SPPF(nn.Module):
    """Spatial pyramid pooling: three 5x5 max pools in a row see 5, 9 and 13 pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1 = Conv(channels, channels // 2)
        self.cv2 = Conv(channels * 2, channels)
        self.m = nn.MaxPool2d(5, stride=1, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        """Transform float [n, channels, h, w], keeping the shape."""
        parts = [self.cv1(x)]
        for _ in range(3):
            parts.append(self.m(parts[-1]))
        y: Tensor = self.cv2(torch.cat(parts, dim=1))
        return y


class _Expectation(nn.Module):
    """Bin values 0..15 under their name in the published state dicts; never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)
        # Explicitly on the CPU: on the meta device PyTorch computes it by a decomposition, which imports Dynamo in 0.6
        # s.
        self.conv.weight.copy_(torch.arange(BINS, dtype=torch.float32, device="cpu").view(1, BINS, 1, 1))


def branch(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Build two 3x3 convolutions and a 1x1 one."""
    return nn.Sequential(Conv(inputs, hidden, 3), Conv(hidden, hidden, 3), nn.Conv2d(hidden, outputs, 1))


class DetectHead(nn.Module):
    """Decoupled anchor-free head: per stride a box branch (`cv2`) and a class branch (`cv3`)."""

    def __init__(self, channels: Channels, class_count: int, class_branch: Branch = branch, bins: int = BINS) -> None:
        """Build the branches. `bins`: of the distribution of a distance; 1: the branch gives the distance itself."""
        super().__init__()
        self.box_channels = 4 * bins
        box = max(16, self.box_channels, channels[0] // 4)
        hidden = max(channels[0], min(class_count, 100))
        self.cv2 = nn.ModuleList(branch(c, box, self.box_channels) for c in channels)
        self.cv3 = nn.ModuleList(class_branch(c, hidden, class_count) for c in channels)
        self.dfl = _Expectation() if bins > 1 else None
        for classes, stride in zip(self.cv3, STRIDES, strict=True):
            # A prior of five objects in a 640 x 640 image, so that training does not start with false alarms.
            nn.init.constant_(classes.get_parameter("2.bias"), log(5 / class_count / (640 / stride) ** 2))

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Compute, per stride, box bins and class logits, [n, box_channels + class_count, h, w]."""
        return [
            torch.cat((box(x), classes(x)), dim=1) for box, classes, x in zip(self.cv2, self.cv3, features, strict=True)
        ]


class YOLOv8(nn.Module):
    """The whole network: backbone, feature pyramid, head. Inputs are RGB in 0..1, sides multiples of 32.

    A subclass for another trunk with this head overrides `scales`, `head_layer`, `bins`, `class_branch`, `backbone` and
    `trunk`.
    """

    scales: ClassVar[Mapping[Size, Scale]] = _SCALES
    head_layer: ClassVar[int] = 22
    bins: ClassVar[int] = BINS

    def __init__(
        self, size: Size, class_count: int, head: Callable[[Channels, int, Branch, int], DetectHead] = DetectHead
    ) -> None:
        """Build the network. `head` builds the head from the features' channels, class count, class branch and bins."""
        super().__init__()
        layers, channels = self.trunk(self.scales[size])
        self.class_count = class_count
        # Keyed by the published layer numbers; those without weights are missing.
        self.model = nn.ModuleDict(
            {**layers, str(self.head_layer): head(channels, class_count, self.class_branch, self.bins)}
        )

    @staticmethod
    def class_branch(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
        """Build a class branch of the head, with the parameters of `Branch`."""
        return branch(inputs, hidden, outputs)

    @staticmethod
    def backbone(scale: Scale) -> dict[str, nn.Module]:
        """Build layers 0 to 8."""
        c1, c2, c3, c4, c5 = scale.channels
        few, many = round(3 * scale.depth), round(6 * scale.depth)
        return {
            "0": Conv(3, c1, 3, 2),
            "1": Conv(c1, c2, 3, 2),
            "2": C2f(c2, c2, few, residual=True),
            "3": Conv(c2, c3, 3, 2),
            "4": C2f(c3, c3, many, residual=True),
            "5": Conv(c3, c4, 3, 2),
            "6": C2f(c4, c4, many, residual=True),
            "7": Conv(c4, c5, 3, 2),
            "8": C2f(c5, c5, few, residual=True),
        }

    @classmethod
    def trunk(cls, scale: Scale) -> tuple[dict[str, nn.Module], Channels]:
        """Build layers by their published numbers; return them and the channels of the result of `features`."""
        _, _, c3, c4, c5 = scale.channels
        few = round(3 * scale.depth)
        layers = {
            **cls.backbone(scale),
            "9": SPPF(c5),
            "12": C2f(c5 + c4, c4, few),
            "15": C2f(c4 + c3, c3, few),
            "16": Conv(c3, c3, 3, 2),
            "18": C2f(c3 + c4, c4, few),
            "19": Conv(c4, c4, 3, 2),
            "21": C2f(c4 + c5, c5, few),
        }
        return layers, (c3, c4, c5)

    @property
    def head(self) -> DetectHead:
        """Last layer."""
        head = self.model[str(self.head_layer)]
        assert isinstance(head, DetectHead)
        return head

    def features(self, x: Tensor) -> list[Tensor]:
        """Compute the head's inputs for strides 8, 16, 32, [n, c, h / stride, w / stride], from float [n, 3, h, w].

        `x` is in 0..1. Layers are counted back from the head; missing numbers are upsampling and joining.
        """
        first = self.head_layer - 10  # The layer that first joins features of different strides.

        def passed(x: Tensor, *numbers: int) -> Tensor:
            for number in numbers:
                x = self.model[str(number)](x)
            return x

        p3 = passed(x, *range(5))
        p4 = passed(p3, 5, 6)
        p5 = passed(p4, *range(7, first - 2))
        up4 = passed(torch.cat((doubled(p5), p4), dim=1), first)
        out3 = passed(torch.cat((doubled(up4), p3), dim=1), first + 3)
        out4 = passed(torch.cat((passed(out3, first + 4), up4), dim=1), first + 6)
        out5 = passed(torch.cat((passed(out4, first + 7), p5), dim=1), first + 9)
        return [out3, out4, out5]

    def raw(self, x: Tensor) -> list[Tensor]:
        """Compute [n, box channels + class_count, h / stride, w / stride] per stride from float [n, 3, h, w] in 0..1.

        The first channels, 64 with 16 bins, are the bins of left, top, right, bottom (logits), the rest class logits.
        """
        outputs: list[Tensor] = self.head(self.features(x))
        return outputs

    def expected(self, levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute float32 distances [n, anchors, 4] and class logits [n, anchors, class_count] from those of `raw`.

        Distances are the expected left, top, right, bottom of the box from its anchor, in units of the stride. Anchors
        run row by row through stride 8, then 16, then 32, as in `anchors`.
        """
        rows = by_anchor(levels).float()
        channels = self.head.box_channels
        return self._distances(rows[..., :channels]), rows[..., channels:]

    def best(self, x: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the `most` anchors with the highest logits, descending; float [n, 3, h, w] must have that many.

        Distances as above [n, k, 4], logits and their classes [n, k], numbers of the anchors [n, k]. Only these boxes
        are computed: all computation for every anchor is in the network's precision.
        """
        features, head = self.features(x), self.head
        logits, classes = by_anchor([each(x) for each, x in zip(head.cv3, features, strict=True)]).max(dim=2)
        best, chosen = logits.topk(most, dim=1)
        sides = by_anchor([each(x) for each, x in zip(head.cv2, features, strict=True)])
        # Whole rows: gathering number by number takes OpenVINO a third of a millisecond.
        first = torch.arange(sides.shape[0], device=sides.device).unsqueeze(1) * sides.shape[1]
        rows = sides.flatten(0, 1).index_select(0, (first + chosen).flatten()).reshape(*chosen.shape, head.box_channels)
        return self._distances(rows.float()), best.float(), classes.gather(1, chosen), chosen

    def _distances(self, sides: Tensor) -> Tensor:
        """Convert the box branches' output, float32 [n, a, 4 * bins], to the expected distances [n, a, 4]."""
        if self.head.dfl is None:
            return sides
        values = self.head.dfl.conv.weight.float().flatten()
        distances: Tensor = (sides.reshape(*sides.shape[:2], 4, BINS).softmax(dim=3) * values).sum(dim=3)
        return distances


def by_anchor(levels: list[Tensor]) -> Tensor:
    """Join [n, c, h, w] of each stride into [n, anchors, c]."""
    return torch.cat([level.permute(0, 2, 3, 1).flatten(1, 2) for level in levels], dim=1)


def size_of(state: Mapping[str, Tensor]) -> Size | None:
    """Return the size whose first convolution a state dict has, None if it has that of no size."""
    stem = state.get("model.0.conv.weight")
    if stem is None or stem.ndim == 0:
        return None
    return next((size for size in SIZES if int(64 * _SCALES[size].width) == len(stem)), None)


def anchors(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Compute the anchors of an input of this size in pixels.

    Centres float32 [anchors, 2] are (x, y) in units of the stride; strides float32 [anchors] are in pixels.
    """
    centres, strides = [], []
    for stride in STRIDES:
        rows, columns = height // stride, width // stride
        y, x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
        centres.append(torch.stack((x, y), dim=2).reshape(-1, 2))
        strides.append(torch.full((rows * columns,), float(stride)))
    return torch.cat(centres), torch.cat(strides)


def doubled(x: Tensor) -> Tensor:
    """Enlarge [n, c, h, w] to [n, c, 2 h, 2 w], each value four times."""
    return functional.interpolate(x, scale_factor=2.0, mode="nearest")
