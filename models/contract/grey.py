"""Grey levels of Pillow's `convert("L")`. Owns: their formula."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 256
_LUMINANCE = (19595.0, 38470.0, 7471.0)  # Parts of 65,536: ITU-R 601-2, as in Pillow's convert("L").
_UNIT = 65536.0


def grey(pixels: Tensor) -> Tensor:
    """Convert uint8 [n, height, width, 3] to float32 of the same shape, all three channels the level of `convert("L")`.

    The products and sums are whole numbers under 2**24, so no device rounds them.
    """
    red, green, blue = pixels.to(torch.float32).unbind(3)
    weighed = red * _LUMINANCE[0] + green * _LUMINANCE[1] + blue * _LUMINANCE[2] + _UNIT / 2
    return (weighed / _UNIT).floor().unsqueeze(3).expand(-1, -1, -1, 3)


def grey_image(image: Tensor) -> Tensor:
    """Convert uint8 [height, width, 3] to grey in the same form, some rows at a time, as images may be large."""
    found = torch.empty_like(image)
    for first in range(0, image.shape[0], _ROWS):
        found[first : first + _ROWS] = grey(image[None, first : first + _ROWS])[0]
    return found
