"""Pictures as networks of these libraries take them: [n, c, h, w]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

Images = Sequence[Image.Image]
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def batch(images: Images, side: int | tuple[int, int]) -> torch.Tensor:
    """Return the pictures as numbers about 0, [n, 3, h, w]: what statistics are measured on, and no preprocessing."""
    size = (side, side) if isinstance(side, int) else side[::-1]
    arrays = [np.asarray(each.convert("RGB").resize(size), np.float32) / 128 - 1 for each in images]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()


def centres(images: Images, side: int, mode: str = "RGB") -> torch.Tensor:
    """Return the centres of pictures whose shorter side is resized by Pillow, uint8."""
    from torchvision.transforms import v2

    seen: Any = v2.Compose([v2.Resize(side), v2.CenterCrop(side), v2.PILToTensor()])
    return torch.stack([seen(each.convert(mode)) for each in images])


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """Return pixels of 0 to 1 less ImageNet's mean, by its deviation."""
    return (pixels - MEAN[:, None, None]) / STD[:, None, None]
