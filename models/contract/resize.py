"""Placement of an image in a network's input, on the host and on a device.

Owns: the geometry of the whole image or its centre, the image's position afterwards, placing it on the host with the
libraries that the networks were trained with, and by torch's operators on the device of its pixels; both agree within a
grey level or two (tests/unit/test_preprocessing.py). Must not know networks, tasks or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING, Literal

import cv2
import numpy as np
from PIL import Image

from models.contract.model import Array, Placement

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Geometry:
    """Placement of an image of one size in a network's input.

    It is resized to `width` by `height`, by `interpolation` (`bilinear` or `bicubic`). Its upper left corner lies at
    (`left`, `top`) of the input. Parts outside are cut off; the rest of the input has the colour `pad`.
    """

    width: int
    height: int
    left: int
    top: int
    interpolation: str = "bilinear"
    antialias: bool = False
    pad: int | tuple[int, int, int] = 0


def place(image: Tensor, geometry: Geometry, out: Tensor) -> None:
    """Write an image, uint8 [3, h, w] as displayed, into `out`, uint8 [height, width, 3]; both on one device."""
    import torch
    from torch.nn import functional

    if image.shape[1:] != (geometry.height, geometry.width):
        # In floats: devices have no kernels for resizing bytes. A bicubic kernel overshoots, and the host clips after
        # each of its two passes.
        sizes = [(geometry.height, geometry.width)]
        if geometry.interpolation == "bicubic":
            sizes.insert(0, (image.shape[1], geometry.width))
        resized = image[None].to(torch.float32)
        for size in sizes:
            resized = functional.interpolate(
                resized, size=size, mode=geometry.interpolation, antialias=geometry.antialias
            )
            resized = resized.round_().clamp_(0, 255)
        image = resized[0].to(torch.uint8)
    paste(image.permute(1, 2, 0), geometry.left, geometry.top, geometry.pad, out)


def paste(image: Tensor, left: int, top: int, pad: int | tuple[int, int, int], out: Tensor) -> None:
    """Write a resized image, uint8 [h, w, 3], into `out`, uint8 [height, width, 3], with its upper left corner at
    (`left`, `top`): parts outside are cut off, the rest has the colour `pad`.
    """
    import torch

    height, width = out.shape[:2]
    first_row, first_column = max(0, top), max(0, left)
    last_row, last_column = min(height, top + image.shape[0]), min(width, left + image.shape[1])
    rows = out[first_row:last_row]
    for strip in (out[:first_row], out[last_row:], rows[:, :first_column], rows[:, last_column:]):
        if isinstance(pad, int):
            strip.fill_(pad)
        else:
            strip.copy_(torch.tensor(pad, dtype=torch.uint8).expand(strip.shape))
    seen = image[first_row - top : last_row - top, first_column - left : last_column - left]
    rows[:, first_column:last_column].copy_(seen)


# Images up to this size are decoded in full. Larger JPEGs may be decoded at 1/2, 1/4 or 1/8 as long as they stay this
# many times larger than what they are resized to: on photographs of 12 to 50 megapixels the network's input then
# differs by at most 0.2 grey levels on average (saving the JPEG again at quality 75: 0.2 to 0.4), and decoding takes a
# third to two thirds of the time.
FULL_DECODE_PIXELS = 4_000_000
DECODE_RATIO = 4
# Beyond this, resizing all of a long strip only to cut out its centre would cost memory without bound.
_LONGEST_STRIP = 4
_LONGEST_WHOLE_STRIP = 128  # If the result must be Pillow's, or is not averaged.
GREY = 114
ResizeHow = Literal["letterbox", "stretch", "top-left", "centre"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
ResizeBy = Literal["opencv", "torch", "pillow"]
Colour = int | tuple[int, int, int]
"""One level for all channels, or one each for red, green and blue."""
_OPENCV = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_DECODE_OVERSAMPLING = 6
_ROWS = 256
_LUMINANCE = (19595.0, 38470.0, 7471.0)  # Parts of 65,536: ITU-R 601-2, as in Pillow's convert("L").
_UNIT = 65536.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Position of an image in the network's input, each axis by itself. Pairs are of x and y.

    `scale`: pixels of the input for one of the image; `pad`: position of its first pixel; `size`: height and width of
    the input.
    """

    placement: Placement
    scale: Array
    pad: Array
    size: tuple[int, int]

    def boxes(self, boxes: Array) -> Array:
        """Convert boxes [k, 4] of the input to pixels of the image, clipped to it."""
        limit = [self.placement.width, self.placement.height] * 2
        found: Array = ((boxes - np.tile(self.pad, 2)) / np.tile(self.scale, 2)).clip(0, limit)
        return found

    def points(self, points: Array) -> Array:
        """Convert points [..., 2] of the input to pixels of the image, clipped to it."""
        limit = [self.placement.width, self.placement.height]
        found: Array = ((points - self.pad) / self.scale).clip(0, limit)
        return found

    def seen(self, values: Array) -> Array:
        """Cut the part that shows the image out of a map [h, w] over the input, of any resolution; never empty."""
        ratio = np.array(values.shape[::-1]) / self.size[::-1]
        full = np.array([self.placement.width, self.placement.height])
        first = np.round(self.pad * ratio).astype(int).clip(0, np.array(values.shape[::-1]) - 1)
        last = np.maximum(np.round((self.pad + self.scale * full) * ratio).astype(int), first + 1)
        found: Array = values[first[1] : last[1], first[0] : last[0]]
        return found


@dataclass(frozen=True)
class Resize(ABC):
    """Geometry of one network. `size`: height and width of its input."""

    size: tuple[int, int]

    @abstractmethod
    def decode_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the smallest (width, height) for a decode at reduced scale of an image of this displayed size.

        Only a decoder that can scale while decoding (JPEG) uses it. (width, height) itself forbids scaling.
        """

    @abstractmethod
    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        """Place an image in the network's input.

        `image`: uint8 [h, w, 3] RGB, possibly of reduced scale; `out`: uint8 [*size, 3], every byte is written;
        `width` and `height`: the image's displayed size in full.
        """

    @abstractmethod
    def exact_geometry(self, width: int, height: int) -> Geometry:
        """Return the geometry of `preprocess` for an image that is decoded in full."""

    def geometry(self, width: int, height: int) -> Geometry | None:
        """Return that geometry for a device; None if it cannot place the image so."""
        return self.exact_geometry(width, height)

    def placement(self, width: int, height: int) -> Placement:
        """Return the placement that `preprocess` returns for an image of this displayed size."""
        geometry = self.exact_geometry(width, height)
        return Placement(width, height, self._scale(width, height), geometry.left, geometry.top)

    def fit(self, placement: Placement) -> Fit:
        """Return the position of the image of this placement, for boxes and points."""
        scale = np.full(2, placement.scale)
        if self._scales_by_axis():
            geometry = self.exact_geometry(placement.width, placement.height)
            scale = np.array([geometry.width, geometry.height]) / [placement.width, placement.height]
        return Fit(placement, scale, np.array([placement.pad_x, placement.pad_y]), self.size)

    @abstractmethod
    def _scale(self, width: int, height: int) -> float:
        """Return the scale before sides are rounded; 1 if the image is stretched over the input."""

    @abstractmethod
    def _scales_by_axis(self) -> bool:
        """Return True if images are stretched, or rounded to whole pixels by libraries that scale boxes alike."""


@dataclass(frozen=True)
class Whole(Resize):
    """The whole image: `letterbox` centres it on `pad`, `top-left` begins at the upper left corner, both as large as
    fits; `stretch` fills the input.

    `shorter`: length of a `top-left` image's shorter side; the image is smaller where its longer side would exceed
    `longer` or the input; 0: as large as fits; `multiple_of`: its sides are rounded down to multiples of this; `by`:
    `opencv` or `torch`, which alone knows `antialias`.
    """

    how: Literal["letterbox", "stretch", "top-left"] = "letterbox"
    shorter: int = 0
    interpolation: Interpolation = "bilinear"
    antialias: bool = False
    pad: Colour = GREY
    longer: int = 0
    multiple_of: int = 1
    by: ResizeBy = "opencv"

    def decode_size(self, width: int, height: int) -> tuple[int, int]:
        """Return six times the resized size for images of twice that or more; others are decoded in full.

        The reference samples the full image sparsely; a scaled decode averages, so the network sees other pixels.
        Measured with a trained YOLOv8s on photographs enlarged to 9-48 megapixels, half-size decoding: at six times
        and above boxes moved no more (IoU 0.977-0.998) than under a new JPEG quality or new noise (0.913-0.998);
        between two and five times some changed beyond that (0.705).
        """
        sides = self.size[0] / height, self.size[1] / width
        scale = _DECODE_OVERSAMPLING * (max(sides) if self.how == "stretch" else self._scale(width, height))
        if scale > 0.5:
            return width, height
        return max(1, round(width * scale)), max(1, round(height * scale))

    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        """Resize as the reference implementations do, with their rounding and their library.

        Another kernel, though within one grey level of it, was seen to move scores of trained weights by up to 0.003.
        """
        geometry = self.exact_geometry(width, height)
        if image.shape[:2] != (geometry.height, geometry.width):
            image = _resized(self, image, (geometry.height, geometry.width))
        paste(image, geometry.left, geometry.top, self.pad, out)
        return self.placement(width, height)

    def exact_geometry(self, width: int, height: int) -> Geometry:
        input_height, input_width = self.size
        kernel = self.interpolation, self.antialias, self.pad
        if self.how == "stretch":
            return Geometry(input_width, input_height, 0, 0, *kernel)
        scale = self._scale(width, height)
        if self.how == "letterbox":
            new_width, new_height = max(1, round(width * scale)), max(1, round(height * scale))
            # As Ultralytics does: of an odd border the smaller half is above and to the left.
            left, top = round((input_width - new_width) / 2 - 0.1), round((input_height - new_height) / 2 - 0.1)
            return Geometry(new_width, new_height, left, top, *kernel)
        room = [side - side % self.multiple_of + self.multiple_of - 1 for side in self.size]  # Before rounding down.
        longer = min(self.longer, room[0] * max(width, height) / height, room[1] * max(width, height) / width)
        if self.longer and longer * min(width, height) < self.shorter * max(width, height):
            # transformers limits the longer side here, and rounds the shorter side to the nearest whole number.
            exact = longer * min(width, height) / max(width, height)
            sides = round(exact), int(exact * max(width, height) / min(width, height))
            sides = sides if width <= height else sides[::-1]
        else:
            # 1e-6 keeps the product from falling below a whole number by its last digit.
            sides = int(width * scale + 1e-6), int(height * scale + 1e-6)
        new_width, new_height = (max(each - each % self.multiple_of, self.multiple_of) for each in sides)
        return Geometry(new_width, new_height, 0, 0, *kernel)

    def _scales_by_axis(self) -> bool:  # Ultralytics does since 8.4.
        return self.how != "top-left" or self.shorter > 0 or self.multiple_of > 1

    def _scale(self, width: int, height: int) -> float:
        if self.how == "stretch":
            return 1.0
        scale = min(self.size[0] / height, self.size[1] / width)
        scale = min(scale, self.longer / max(width, height)) if self.longer else scale
        return min(scale, self.shorter / min(width, height)) if self.shorter else scale


@dataclass(frozen=True)
class Square(Whole):
    """The square in an image's centre, resized to the input by OpenCV: YOLOv5's classifiers see it so."""

    how: Literal["letterbox", "stretch", "top-left"] = "stretch"

    def decode_size(self, width: int, height: int) -> tuple[int, int]:
        return width, height

    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        side = min(image.shape[:2])
        top, left = ((each - side) // 2 for each in image.shape[:2])
        return super().preprocess(image[top : top + side, left : left + side], out, width, height)

    def geometry(self, width: int, height: int) -> None:
        return None


@dataclass(frozen=True)
class Centre(Resize):
    """The centre of an image whose shorter side is resized to `shorter` with `interpolation`, as torchvision does with
    a PIL image; `pad` fills the rest of the input.

    `shape`: height and width that replace `shorter`: the image is stretched to them, or keeps its sides' ratio and is
    just large enough to cover them (`keep` is `cover`), or lies within them (`within`). `by`: `pillow` gives a PIL
    image's pixels to the last bit, of images decoded in full; `torch` takes a fifth of the time and is within one grey
    level of it with bilinear interpolation, within two with bicubic, and like `opencv` knows no other. `rounds`:
    whether half a pixel beside the centre is rounded to the even number, or down.
    """

    shorter: int = 0
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    by: ResizeBy = "torch"
    shape: tuple[int, int] | None = None
    keep: Literal["", "cover", "within"] = ""
    pad: Colour = 0
    rounds: bool = True

    @property
    def keeps_all(self) -> bool:
        """Return True if the network sees all of every image."""
        return self.shape is not None and self.keep != "cover" and min(np.subtract(self.size, self.shape)) >= 0

    def decode_size(self, width: int, height: int) -> tuple[int, int]:
        """Return `DECODE_RATIO` times the resized size above `FULL_DECODE_PIXELS` if torch averages, else full size."""
        scale = DECODE_RATIO * self._scale(width, height)
        if self.by == "pillow" or not self.antialias or width * height <= FULL_DECODE_PIXELS or scale >= 1:
            return width, height
        return ceil(width * scale), ceil(height * scale)

    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        import torch

        target_height, target_width = target = self._resized_size(width, height)
        crop_height, crop_width = self.size
        left, top = self._corner(target)
        covered_height, covered_width = covered = _covered(image.shape[0], image.shape[1], width, height)
        exact, kernel = covered == image.shape[:2], Image.Resampling[self.interpolation.upper()]
        strip_of = max(target) / min(target) if self.keep != "within" else 1
        if self.by == "pillow" and exact and strip_of <= _LONGEST_WHOLE_STRIP:
            # All in one call: Pillow chooses which pass comes first, and chose otherwise before version 13.
            whole = Image.fromarray(image.numpy()).resize((target_width, target_height), kernel)
            paste(torch.from_numpy(np.array(whole)), -left, -top, self.pad, out)
            return self.placement(width, height)
        if strip_of > (_LONGEST_STRIP if self.antialias else _LONGEST_WHOLE_STRIP):
            x_step, y_step = covered_width / target_width, covered_height / target_height
            x, y = max(0, left), max(0, top)
            right, bottom = min(target_width, left + crop_width), min(target_height, top + crop_height)
            box, size = (x * x_step, y * y_step, right * x_step, bottom * y_step), (right - x, bottom - y)
            strip = torch.from_numpy(np.array(Image.fromarray(image.numpy()).resize(size, kernel, box)))
            paste(strip, x - left, y - top, self.pad, out)
            return self.placement(width, height)
        # torch rounds image * factor down to the target: not below it, whatever the last digit of the product.
        factors = (target_height / covered_height * (1 + 1e-9), target_width / covered_width * (1 + 1e-9))
        resized = _resized(self, image, target, None if exact else factors)
        paste(resized, -left, -top, self.pad, out)
        return self.placement(width, height)

    def exact_geometry(self, width: int, height: int) -> Geometry:
        target = self._resized_size(width, height)
        left, top = self._corner(target)
        return Geometry(target[1], target[0], -left, -top, self.interpolation, self.antialias, self.pad)

    def geometry(self, width: int, height: int) -> Geometry | None:
        target = self._resized_size(width, height)
        is_pillows = self.interpolation in ("nearest", "lanczos")
        return None if is_pillows or max(target) > _LONGEST_STRIP * min(target) else self.exact_geometry(width, height)

    def _scales_by_axis(self) -> bool:
        return self.shape is not None and not self.keep

    def _scale(self, width: int, height: int) -> float:
        if self.shape is None:
            return self.shorter / min(width, height)
        sides = self.shape[0] / height, self.shape[1] / width
        return min(sides) if self.keep == "within" else max(sides)

    def _resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (height, width), rounded as torchvision's functional.resize does, and as timm does for `keep`."""
        if self.shape is not None:
            factors = height / self.shape[0], width / self.shape[1]
            factor = max(factors) if self.keep == "within" else min(factors)
            return (max(1, round(height / factor)), max(1, round(width / factor))) if self.keep else self.shape
        if width <= height:
            return int(self.shorter * height / width), self.shorter
        return self.shorter, int(self.shorter * width / height)

    def _corner(self, target: tuple[int, int]) -> tuple[int, int]:
        """Return left and top of the cut in an image resized to this (height, width); below 0 if it is smaller."""
        height, width = self.size
        left, top = (target[1] - width) / 2, (target[0] - height) / 2
        left, top = (round(left), round(top)) if self.rounds else (floor(left), floor(top))
        return left if left >= 0 else -((width - target[1]) // 2), top if top >= 0 else -((height - target[0]) // 2)


def _resized(
    resize: Whole | Centre, image: Tensor, size: tuple[int, int], factors: tuple[float, float] | None = None
) -> Tensor:
    """Resize an image, uint8 [h, w, 3], to (height, width), by torch's `factors` if its decode was rounded up."""
    import torch
    from torch.nn import functional

    if resize.by == "opencv":
        pixels = np.ascontiguousarray(image.numpy())
        return torch.from_numpy(cv2.resize(pixels, size[::-1], interpolation=_OPENCV[resize.interpolation]))
    # Unsqueezed before the permutation, it has the strides of a channels-last batch, for which torch has a vectorised
    # kernel on bytes: twice as fast as on planes.
    return functional.interpolate(
        image.unsqueeze(0).permute(0, 3, 1, 2),
        size=size if factors is None else None,
        scale_factor=factors,
        mode=resize.interpolation,
        antialias=resize.antialias,
    )[0].permute(1, 2, 0)


def _covered(image_height: int, image_width: int, width: int, height: int) -> tuple[float, float]:
    """Return height and width of the image itself within an image decoded at 1/2, 1/4 or 1/8, else the image's size.

    Such a decode rounds its size up; taking the last row and column for whole pixels would shift everything.
    """
    for reduction in (2, 4, 8):
        if (image_height, image_width) == (ceil(height / reduction), ceil(width / reduction)):
            return height / reduction, width / reduction
    return image_height, image_width


def grey(pixels: Tensor) -> Tensor:
    """Convert uint8 [n, height, width, 3] to float32 of the same shape, all three channels the level of `convert("L")`.

    The products and sums are whole numbers under 2**24, so no device rounds them.
    """
    red, green, blue = pixels.float().unbind(3)
    weighed = red * _LUMINANCE[0] + green * _LUMINANCE[1] + blue * _LUMINANCE[2] + _UNIT / 2
    return (weighed / _UNIT).floor().unsqueeze(3).expand(-1, -1, -1, 3)


def grey_image(image: Tensor) -> Tensor:
    """Convert uint8 [height, width, 3] to grey in the same form, some rows at a time, as images may be large."""
    found = image.new_empty(image.shape)
    for first in range(0, image.shape[0], _ROWS):
        found[first : first + _ROWS] = grey(image[None, first : first + _ROWS])[0]
    return found
