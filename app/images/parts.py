"""Parts of an image: cut out, and straightened if they are turned.

Owns: this geometry. Must not know the purpose of the parts.
"""

from __future__ import annotations

import cv2
import numpy as np
import torch
from torch import Tensor

from app.images.header import InvalidImageError
from models.contract.cascade import Region


def part_of(image: Tensor, region: Region) -> Tensor:
    """Return the pixels of a region, contiguous. Raises InvalidImageError for one that lies outside."""
    height, width = image.shape[:2]
    x, y, columns, rows, quarters, corners = region
    if corners and np.isfinite(corners).all() and min(columns, rows) > 0 and max(columns, rows) <= width + height:
        square = np.array(((0, 0), (columns, 0), (columns, rows), (0, rows)), np.float32)
        turn = cv2.getPerspectiveTransform(np.array(corners, np.float32).reshape(4, 2), square)
        part = cv2.warpPerspective(
            image.numpy(), turn, (columns, rows), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
        )
    elif not corners and min(x, y) >= 0 and 0 < columns <= width - x and 0 < rows <= height - y:
        part = image[y : y + rows, x : x + columns].numpy()
    else:
        raise InvalidImageError(f"the image of {width} x {height} has no region at {x}, {y}")
    return torch.from_numpy(np.ascontiguousarray(np.rot90(part, quarters)))
