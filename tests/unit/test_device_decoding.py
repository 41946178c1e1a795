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
from app.images.decoding import decode
from app.images.header import Header, InvalidImageError, read_header
from app.images.passing import MOST_PIXELS, plain_header, read_file, write_file
from app.precision.probes import seen
from app.processes.arena import Arena
from app.serving.filling import Filling
from app.worker.device_decoding import DeviceDecoding
from backends import BackendError, DeviceLostError
from backends.contract import image_decoder as module
from backends.contract.image_decoder import ImageDecoder, nvjpeg_decoder
from models import ModelSpec, Placement, open_model
from models.sample import IMAGES
from tests.support.doubles import Decoders

RESNET = open_model(ModelSpec("resnet50", "resnet50", "random"), Path("nowhere"))
PHOTO = (IMAGES / "classify_star.jpg").read_bytes()
PHOTO_SIZE = (read_header(PHOTO).width, read_header(PHOTO).height)
ROOM = 1 << 20


def jpeg(width=160, height=120, mode="RGB", orientation=0, **options):
    """Draw a picture in which every direction can be told from every other."""
    across = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    down = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    rgb = np.stack([across, down, np.full_like(down, 60)], 2).astype(np.uint8)
    stream = io.BytesIO()
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.fromarray(rgb).convert(mode).save(stream, "JPEG", exif=exif, **options)
    return stream.getvalue()


def passes(file, room=ROOM):
    """By what the event loop reads of a file, and by what the worker does."""
    plain = plain_header(memoryview(file), room)
    if plain is None:
        return False
    assert plain[0] == read_header(file)
    slot = np.zeros(room, np.uint8)
    write_file(slot, memoryview(file), *plain)
    try:
        return read_file(slot).data.tobytes() == file
    except InvalidImageError:
        return False


@pytest.mark.parametrize(
    "file",
    [
        PHOTO,
        jpeg(),
        jpeg(mode="L"),
        jpeg(progressive=True),
        jpeg(subsampling=0),
        jpeg(orientation=6),
        jpeg(comment=b"anything"),
        jpeg() + b"what follows",
        jpeg(restart_marker_blocks=4),
    ],
)
def test_what_every_device_decodes_passes(file):
    assert passes(file)


def without_end(file):
    return file[:-2]


def adobe(transform):
    return b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([transform])


def with_segment(file, segment):
    return file[:2] + segment + file[2:]


FRAME = b"\xff\xc0\x00\x0b\x08\x40\x00\x40\x00\x01\x01\x11\x00"
ODD = {
    "four colours": jpeg(mode="CMYK"),
    "cut short": without_end(jpeg()),
    "a half": jpeg()[: len(jpeg()) // 2],
    "a second frame header": with_segment(jpeg(), FRAME),
    "a frame in the scan": jpeg()[:-2] + FRAME + b"\xff\xd9",
    "colours that are RGB": with_segment(jpeg(), adobe(0)),
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


def test_other_formats_large_images_and_files_larger_than_the_slot_are_left_to_the_host():
    stream = io.BytesIO()
    Image.new("RGB", (9, 9)).save(stream, "PNG")
    assert not passes(stream.getvalue())
    assert passes(PHOTO, len(PHOTO) + 20)
    assert not passes(PHOTO, len(PHOTO) + 19)
    assert MOST_PIXELS >= 1920 * 1080
    assert not passes(jpeg(1920, 1100, quality=5))


def test_a_file_comes_out_of_a_slot_as_it_went_in():
    slot = np.zeros(len(PHOTO) + 100, np.uint8)
    header = Header("JPEG", 375, 500, 6)
    write_file(slot, memoryview(PHOTO), header, 600)
    found = read_file(slot)
    assert found.header == header
    assert found.data.tobytes() == PHOTO
    slot[:] = 0
    assert found.data.tobytes() == PHOTO  # A copy: decoders may still write to the slot.


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
        item = SimpleNamespace(pool=pool, slot=0, terms=terms, position=0, image=None, refill=None)
        heard.clear()
        decoders.given.clear()
        made.fill([item], file)
        return item

    yield SimpleNamespace(fill=fill, arena=arena, decoders=decoders, heard=heard, pool=pool)
    arena.close()


def test_a_file_that_a_device_may_decode_passes_into_the_slot_and_no_decoder_sees_it(filling):
    turned = jpeg(500, 375, orientation=6)
    inbox = Inbox(1, 1 << 20)
    decoder = Decoder(DecodePlan((RESNET,), filling.arena.pools, 1, 1 << 20, ("info", "text")), inbox, filling.arena)
    inbox.write(0, turned)
    decoded = decoder.answer(Job(1, Kind.ENCODED, 0, 0, 0, len(turned), 10**8, 10**8, 0, 0))
    item = filling.fill(turned)
    assert filling.decoders.given == []
    assert read_file(filling.arena.slot(0, 0)).data.tobytes() == turned
    assert filling.heard == [Placement(decoded.width, decoded.height, decoded.scale, decoded.pad_x, decoded.pad_y)]
    assert (filling.heard[0].width, filling.heard[0].height) == (375, 500)
    item.refill(item)  # The device could not, after all.
    [image] = filling.decoders.again
    assert (image.body, image.kind) == (turned, Kind.ENCODED)


@pytest.mark.parametrize("file", [ODD["four colours"], jpeg(3000, 60), b"junk", PHOTO[:300], b""])
def test_every_other_file_is_a_decoders_to_answer(filling, file):
    item = filling.fill(file)
    assert [image.body for image in filling.decoders.given] == [file]
    assert (filling.heard, item.refill) == ([], None)


class FakeDecoder(ImageDecoder):
    """The host's own pixels, brighter by `off`; some files it cannot decode, and then it decodes none of the list."""

    name = "a fake"

    def __init__(self, off=0, bad=(), error=BackendError):
        super().__init__("cpu")
        self.off, self.bad, self.error, self.calls = off, bad, error, []

    def decode(self, files):
        self.calls.append(len(files))
        encoded = [file.numpy().tobytes() for file in files]
        if any(file in self.bad for file in encoded):
            raise self.error("Failed to decode batch: 10")
        return [self._decoded(file) for file in encoded]

    def _decoded(self, file):
        with Image.open(io.BytesIO(file)) as image:
            stored = torch.from_numpy(np.array(image.convert("RGB"))).to(torch.int16)
        return (stored + self.off).clamp(0, 255).to(torch.uint8).permute(2, 0, 1)


def filled(decoder, files, model=RESNET):
    """Decode files in slots; return the rows, and which files could not be decoded."""
    slots = []
    for row, file in enumerate(files):
        slot = np.zeros(len(file) + 20, np.uint8)
        plain = plain_header(memoryview(file), len(slot))
        assert plain is not None
        write_file(slot, memoryview(file), *plain)
        slots.append((row, slot))
    found, undecoded = DeviceDecoding(decoder, model).on_device(slots)
    assert sorted([*found, *undecoded]) == list(range(len(files))), "each is either"
    buffer = np.zeros((len(files), *model.input_shape), np.uint8)
    for row, item in found.items():
        buffer[row] = item.numpy()
    return buffer, undecoded


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_placed_as_on_the_host(orientation):
    file = jpeg(400, 300, orientation=orientation, quality=95)
    (row,), undecoded = filled(FakeDecoder(), [file])
    assert undecoded == ()
    host = seen(RESNET, file)[0]
    assert np.abs(host.astype(int) - row).max() <= 1
    if orientation > 1:
        assert np.abs(seen(RESNET, jpeg(400, 300, quality=95))[0].astype(int) - row).max() > 50


def test_a_lost_device_is_lost():
    file = jpeg()
    with pytest.raises(DeviceLostError):
        filled(FakeDecoder(bad=[file], error=DeviceLostError), [file])


def test_pixels_of_another_size_than_the_header_says_are_not_taken():
    class Other(FakeDecoder):
        def _decoded(self, file):
            return super()._decoded(file)[:, 1:]

    assert filled(Other(), [jpeg()])[1] == (0,)


def test_large_images_are_decoded_a_few_at_a_time():
    files = [jpeg(1900, 1080, quality=5)] * 40
    decoder = FakeDecoder()
    _, undecoded = filled(decoder, files)
    assert undecoded == ()
    assert sum(decoder.calls) == 40
    assert max(decoder.calls) == (32 << 20) // (1900 * 1080)


def test_nvjpeg_is_asked_by_torchvisions_operator(monkeypatch):
    asked = []

    def decode_jpegs_cuda(files, mode, device):
        asked.append((len(files), mode, str(device)))
        if len(files) == 3:
            raise RuntimeError("Failed to decode batch: 10")
        return [decode(file.numpy().tobytes(), read_header(file.numpy().tobytes())).permute(2, 0, 1) for file in files]

    monkeypatch.setattr(torch.ops.image, "decode_jpegs_cuda", decode_jpegs_cuda)
    decoder = nvjpeg_decoder("cuda:1")
    assert decoder is not None
    files = [torch.frombuffer(bytearray(PHOTO), dtype=torch.uint8)] * 2
    assert [tuple(image.shape) for image in decoder.decode(files)] == [(3, 375, 500)] * 2
    assert asked == [(2, 3, "cuda:1")]
    with pytest.raises(BackendError, match="cuda:1 failed: Failed to decode batch: 10"):
        decoder.decode(files + files[:1])
    monkeypatch.setattr(module.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    assert nvjpeg_decoder("cuda:0") is None


def test_a_file_of_a_size_is_placed_as_the_model_of_that_moment_has_it(filling):
    """What is kept of a size belongs to the object that a load replaces."""
    other = open_model(ModelSpec("resnet50", "resnet50", "random"), Path("nowhere"))
    object.__setattr__(other, "placement", lambda *_: Placement(1, 1))
    for model in (RESNET, other, RESNET):
        filling.pool.model = model
        for _ in range(2):
            filling.fill(PHOTO)
            assert filling.heard == [model.placement(*PHOTO_SIZE)]
    assert RESNET.placement(*PHOTO_SIZE) != other.placement(*PHOTO_SIZE)
