"""Files in slots: which ones, how they lie there, and what the worker makes of them with a decoder that is a fake."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from app.decoder.decoder import Decoder
from app.decoder.messages import DecodePlan, Inbox, Job, Kind
from app.images.header import InvalidImageError, plain_header, read_file, write_file
from app.precision.probes import seen
from app.processes.arena import Arena
from app.serving.submissions import Filling
from app.worker.device_decoding import DeviceDecoding
from backends.contract.backend import ImageDecoder
from models import ModelSpec, Placement, open_model
from models.sample import IMAGES
from tests.support.doubles import Decoders
from tests.support.images import encoded, passes, turned

RESNET = open_model(ModelSpec("resnet50", "resnet50", "random"), Path("nowhere"))
PHOTO = (IMAGES / "classify_star.jpg").read_bytes()


def jpeg(width=160, height=120, mode="RGB", **options):
    """Draw a picture in which every direction can be told from every other."""
    across = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    down = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    rgb = np.stack([across, down, np.full_like(down, 60)], 2).astype(np.uint8)
    return encoded(Image.fromarray(rgb).convert(mode), "JPEG", **options)


@pytest.mark.parametrize(
    "file",
    [
        PHOTO,
        jpeg(),
        jpeg(mode="L"),
        jpeg(progressive=True),
        jpeg(subsampling=0),
        jpeg(exif=turned(6)),
        jpeg(comment=b"anything"),
        jpeg() + b"what follows",
        jpeg(restart_marker_blocks=4),
    ],
)
def test_what_every_device_decodes_passes(file):
    assert passes(file)


def with_segment(file, segment):
    return file[:2] + segment + file[2:]


ADOBE_RGB = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"
FRAME = b"\xff\xc0\x00\x0b\x08\x40\x00\x40\x00\x01\x01\x11\x00"
ODD = {
    "four colours": jpeg(mode="CMYK"),
    "cut short": jpeg()[:-2],
    "a half": jpeg()[: len(jpeg()) // 2],
    "a second frame header": with_segment(jpeg(), FRAME),
    "a frame in the scan": jpeg()[:-2] + FRAME + b"\xff\xd9",
    "colours that are RGB": with_segment(jpeg(), ADOBE_RGB),
    "junk between segments": jpeg()[:20] + b"\0\0" + jpeg()[20:],
    "fill bytes": with_segment(jpeg(), b"\xff"),
    "many scans": jpeg(progressive=True) + b"\xff\xda" * 40,
    "components of other names": jpeg().replace(b"\x03\x01\x22\x00\x02\x11", b"\x03\x52\x22\x00\x47\x11"),
    "arithmetic coding": with_segment(jpeg(), b"\xff\xcc\x00\x04\x00\x10"),
    "many segments": with_segment(jpeg(), b"\xff\xfe\x00\x02" * 300),
    "twelve bits": jpeg().replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_left_to_the_host(name):
    assert not passes(ODD[name])


@pytest.mark.parametrize(
    "head",
    [
        (0, 1, 1, 0, 1),
        (10, 0, 1, 0, 1),
        (10, 1 << 31, 1, 0, 1),
        (10, 1, 1, 0, 9),
        (10, 1, 1, 0, 1),
        (10, 1, 1, 9, 1),
    ],
)
def test_what_a_decoder_that_was_taken_over_writes_is_no_file(head):
    slot = np.zeros(1000, np.uint8)
    struct.pack_into("<IIIIB", slot.data, 0, *head)
    with pytest.raises(InvalidImageError):
        read_file(slot)


@pytest.fixture
def filling():
    arena = Arena([(224 * 224 * 3, 2)])
    decoders, heard = Decoders(), []
    made = Filling(arena, 10**8, decoders, lambda item, error: heard.append(error or item.placement), reads_pixels=True)
    pool = SimpleNamespace(model=RESNET, index=0, passes_files=True)

    def fill(file):
        terms = SimpleNamespace(client_lease=None, client="", priority=0)
        item = SimpleNamespace(pool=pool, slot=0, terms=terms, position=0, image=None, refill=None, begun_s=0.0)
        heard.clear()
        decoders.given.clear()
        made.fill([item], file)
        return item

    yield SimpleNamespace(fill=fill, arena=arena, decoders=decoders, heard=heard, pool=pool)
    arena.close()


def test_a_file_that_a_device_may_decode_passes_into_the_slot_and_no_decoder_sees_it(filling):
    body = jpeg(500, 375, exif=turned(6))
    inbox = Inbox(1, 1 << 20)
    decoder = Decoder(DecodePlan((RESNET,), filling.arena.pools, 1, 1 << 20, ("info", "text")), inbox, filling.arena)
    inbox.write(0, body)
    decoded = decoder.answer(Job(1, Kind.ENCODED, 0, 0, 0, len(body), 10**8, 10**8, 0, 0))
    item = filling.fill(body)
    assert filling.decoders.given == []
    assert read_file(filling.arena.slot(0, 0)).data.tobytes() == body
    assert filling.heard == [Placement(decoded.width, decoded.height, decoded.scale, decoded.pad_x, decoded.pad_y)]
    assert (filling.heard[0].width, filling.heard[0].height) == (375, 500)
    item.refill(item)  # The device could not, after all.
    [image] = filling.decoders.again
    assert (image.body, image.kind) == (body, Kind.ENCODED)


@pytest.mark.parametrize("file", [ODD["four colours"], jpeg(3000, 60), b"junk", PHOTO[:300], b""])
def test_every_other_file_is_a_decoders_to_answer(filling, file):
    item = filling.fill(file)
    assert [image.body for image in filling.decoders.given] == [file]
    assert (filling.heard, item.refill) == ([], None)


class FakeDecoder(ImageDecoder):
    """The host's own pixels."""

    name = "a fake"

    def decode(self, files):
        return [self._decoded(file.numpy().tobytes()) for file in files]

    def _decoded(self, file):
        with Image.open(io.BytesIO(file)) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def on_device(decoder, file):
    """Decode a file in a slot; return the rows, and which files could not be decoded."""
    slot = np.zeros(len(file) + 20, np.uint8)
    write_file(slot, memoryview(file), *plain_header(memoryview(file), len(slot)))
    return DeviceDecoding(decoder, RESNET).on_device([(0, slot)])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_placed_as_on_the_host(orientation):
    file = jpeg(400, 300, exif=turned(orientation), quality=95)
    found, undecoded = on_device(FakeDecoder("cpu"), file)
    assert undecoded == ()
    row = found[0].numpy()
    host = seen(RESNET, file)[0]
    assert np.abs(host.astype(int) - row).max() <= 1
    if orientation > 1:
        assert np.abs(seen(RESNET, jpeg(400, 300, quality=95))[0].astype(int) - row).max() > 50


def test_pixels_of_another_size_than_the_header_says_are_not_taken():
    class Other(FakeDecoder):
        def _decoded(self, file):
            return super()._decoded(file)[:, 1:]

    assert on_device(Other("cpu"), jpeg()) == ({}, (0,))
