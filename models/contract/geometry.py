"""Placement of an image by torch's operators, on the device of its pixels.

Owns: the definition of a geometry, and its execution. models.contract.resize does the same on the host, with the
libraries that the networks were trained with; both agree within a grey level or two (tests/unit/test_geometry.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
