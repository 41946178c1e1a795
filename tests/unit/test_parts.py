"""Parts of images: cut out, straightened and turned, and placed by a decoder."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from app.decoder.decoder import Decoder
from app.decoder.messages import Decoded, DecodePlan, Inbox, Job, Kind, Status
from app.images.header import InvalidImageError
from app.images.parts import part_of
from app.processes.arena import Arena
from app.processes.channel import to_packet
from models import PixelModel, open_model, parse_spec
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
        Region(-1, 0, 1, 1),
        Region(0, 0, 0, 10),
        Region(0, 0, 1 << 20, 10, 0, (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0)),
        Region(0, 0, 9, 9, 0, (float("nan"),) * 8),
        Region(0, 0, 0, 9, 0, (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0)),
    ],
)
def test_what_lies_outside_or_is_too_large_is_refused(region: Region) -> None:
    with pytest.raises(InvalidImageError):
        part_of(IMAGE, region)


def test_a_decoder_places_each_region_behind_an_image_in_its_slot() -> None:
    model, file = open_model(parse_spec("resnet18:random"), Path("nowhere")), io.BytesIO()
    assert isinstance(model, PixelModel)
    Image.fromarray(IMAGE.numpy()).save(file, "PNG")
    regions = [(2, Region(5, 6, 20, 10)), (0, Region(0, 0, 30, 9, 3, (0.5, 1, 30, 2, 29, 11, 0, 10)))]
    image, tail, inbox = file.getvalue(), to_packet(regions), Inbox(1, 1 << 20)
    with contextlib.closing(Arena([(int(np.prod(model.input_shape)), 3)])) as arena:
        inbox.write(0, image, tail)
        decoder = Decoder(DecodePlan((model,), arena.pools, 1, 1 << 20, ("info", "text")), inbox, arena)
        job = Job(7, Kind.REGIONS, 0, 0, 0, len(image) + len(tail), 10**6, 10**6, tail=len(tail))
        assert decoder.answer(job) == Decoded(7, Status.PLACED, 60, 40)
        for slot, region in regions:
            part, placed = part_of(IMAGE, region), torch.empty(model.input_shape, dtype=torch.uint8)
            model.preprocess(part, placed, part.shape[1], part.shape[0])
            assert np.array_equal(arena.slot(0, slot), placed.numpy().reshape(-1))
