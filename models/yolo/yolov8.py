"""YOLOv8 networks, sizes n to x, for every task, with the state dicts of the published checkpoints.

Owns: the layers, their initial values, the fusion of BatchNorm, and the heads with the decoding of their outputs on the
device. Must not know images, files, thresholds or devices. Where `forward` says nothing, it transforms float
[n, channels, h, w] and keeps the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import pi
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
MASKS = 32
"""Prototypes of masks, and coefficients of each anchor."""
_CLASSIFIER_CHANNELS = 1280
_MOST_PROTOTYPE_CHANNELS = 256


class Scale(NamedTuple):
    """Factors of a size: of the number of blocks, of channels, and the most channels before that factor."""

    depth: float
    width: float
    max_channels: int

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels after each of the five layers that halve an image's sides."""
        return tuple(int(min(base, self.max_channels) * self.width) for base in (64, 128, 256, 512, 1024))


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
        # Explicitly on the CPU: on the meta device PyTorch imports Dynamo for it.
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

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Compute, per stride, box bins and class logits, [n, box_channels + class_count, h, w]."""
        return [
            torch.cat((box(x), classes(x)), dim=1) for box, classes, x in zip(self.cv2, self.cv3, features, strict=True)
        ]


class YOLOv8(nn.Module):
    """The whole network: backbone, feature pyramid, head. Inputs are RGB in 0..1, sides multiples of 32.

    `classifier_layer`: the number of the last layer of the trunk's classifier; `unused`: beginnings of names in state
    dicts that are left out; `computed`: layers that have no module here; `class_branch`: builds a
    class branch of the head.
    """

    scales: ClassVar[Mapping[Size, Scale]] = {
        "n": Scale(1 / 3, 0.25, 1024),
        "s": Scale(1 / 3, 0.50, 1024),
        "m": Scale(2 / 3, 0.75, 768),
        "l": Scale(1.0, 1.00, 512),
        "x": Scale(1.0, 1.25, 512),
    }
    head_layer: ClassVar[int] = 22
    classifier_layer: ClassVar[int] = 9
    bins: ClassVar[int] = BINS
    unused: ClassVar[tuple[str, ...]] = ()
    computed: ClassVar[tuple[nn.Module, ...]] = (nn.Upsample(scale_factor=2.0),)
    class_branch = staticmethod(branch)

    def __init__(
        self, size: Size, class_count: int, head: Callable[[Channels, int, Branch, int], DetectHead] = DetectHead
    ) -> None:
        super().__init__()
        layers, channels = self.trunk(self.scales[size])
        self.class_count = class_count
        # Keyed by the published layer numbers; those without weights are missing.
        self.model = nn.ModuleDict(
            {**layers, str(self.head_layer): head(channels, class_count, self.class_branch, self.bins)}
        )

    @staticmethod
    def backbone(scale: Scale) -> dict[str, nn.Module]:
        """Build layers 0 to 8, by their published numbers: float [n, 3, h, w] -> [n, c5, h / 32, w / 32]."""
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

    @classmethod
    def classifier(cls, size: Size, class_count: int) -> nn.Module:
        """Build the backbone with a head of classes. No size of a classifier has its last layers narrowed."""
        scale = cls.scales[size]._replace(max_channels=1024)
        return ClassifierYOLO([*cls.backbone(scale).values()], scale.channels[-1], class_count)

    @classmethod
    def size_of(cls, state: Mapping[str, Tensor]) -> Size | None:
        """Return the size whose first convolution a state dict has, None if it has that of no size."""
        stem = state.get("model.0.conv.weight")
        if stem is None or stem.ndim == 0:
            return None
        return next((size for size in SIZES if int(64 * cls.scales[size].width) == len(stem)), None)

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
        """Decode boxes and extras of anchors at `centres` [a, 2], in units of `strides` [a, 1]."""
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

    def angle(self, output: Tensor) -> Tensor:
        """Convert the branch's output to radians, from -pi/4 to 3 pi/4."""
        return (output.sigmoid() - 0.25) * pi

    def places(self, output: Tensor, centres: Tensor) -> Tensor:
        """Compute places from the branch's output for key points and the anchors' centres; all in strides."""
        return output * 2 + centres - 0.5


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

    computed: ClassVar[tuple[nn.Module, ...]] = (nn.AdaptiveAvgPool2d(1),)

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
