"""Parts of images: cut out, straightened and turned, and how they travel to decoders."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.decoder.messages import pack_regions, split_regions
from app.images.header import InvalidImageError
from app.images.parts import part_of
from models.contract.cascade import Region

IMAGE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def test_upright_parts_are_the_pixels_themselves() -> None:
    assert torch.equal(part_of(IMAGE, Region(5, 6, 20, 10)), IMAGE[6:16, 5:25])
    assert torch.equal(part_of(IMAGE, Region(0, 0, 60, 40)), IMAGE)


def test_straightened_parts_begin_at_their_first_corner() -> None:
    corners = (5.0, 6.0, 25.0, 6.0, 25.0, 16.0, 5.0, 16.0)
    assert torch.equal(part_of(IMAGE, Region(0, 0, 20, 10, 0, corners)), IMAGE[6:16, 5:25])
    turned = (25.0, 16.0, 5.0, 16.0, 5.0, 6.0, 25.0, 6.0)
    upside_down = part_of(IMAGE, Region(0, 0, 20, 10, 0, turned))
    assert torch.equal(upside_down, IMAGE[6:17, 5:26].flip(0, 1)[:10, :20])


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_parts_are_turned_by_quarters(quarters: int) -> None:
    part = part_of(IMAGE, Region(5, 6, 20, 10, quarters))
    assert part.is_contiguous()
    assert torch.equal(part, torch.rot90(IMAGE[6:16, 5:25], quarters))


@pytest.mark.parametrize(
    "region",
    [
        Region(50, 0, 20, 10),
        Region(0, 0, 0, 10),
        Region(0, 0, 1 << 20, 10, 0, (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0)),
        Region(0, 0, 9, 9, 0, (float("nan"),) * 8),
        Region(0, 0, 0, 9, 0, (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0)),
    ],
)
def test_what_lies_outside_or_is_too_large_is_refused(region: Region) -> None:
    with pytest.raises(InvalidImageError):
        part_of(IMAGE, region)


def test_regions_travel_behind_their_image() -> None:
    regions = [Region(1, 2, 3, 4), Region(0, 0, 30, 9, 3, (0.5, 1, 30, 2, 29, 11, 0, 10))]
    data = memoryview(b"image" + pack_regions([7, 8], regions))
    image, found = split_regions(data, 2)
    assert bytes(image) == b"image"
    assert found == [(7, regions[0]), (8, regions[1])]
