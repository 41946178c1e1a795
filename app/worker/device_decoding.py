"""Decoding of files in slots on the device: the rows of a batch that no decoder process has made.

    slots ─► files ─► the device's decoder, all at once ─► turned, resized, placed there ─► rows of the batch
                            └─ one is broken: halves, until it is alone ─► the server has it decoded on the host

Rows stay on the device if the executable takes them there. Files are a client's bytes: nothing of the worker but the
device's own decoder looks into them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from app.core import DecodedBy
from app.images.decoding import STEPS
from app.images.header import InvalidImageError, PassedFile, read_file, read_header
from app.precision.gate import errors_of_decoding
from app.precision.probes import decoded_by_host, probe_files
from backends import Backend, BackendError, BackendUnavailableError, DeviceLostError, Executable
from backends.contract.backend import ImageDecoder, Pixels
from backends.contract.errors import translated_errors
from models import Model, PixelModel
from models.contract.resize import place

Where = Literal["host", "device", "auto"]
Row = tuple[int, PassedFile]

_PIXELS_AT_ONCE = 32 << 20
"""Most pixels of the images that one call decodes: they take 96 MiB of the device's memory."""

log = logging.getLogger("anychip.worker")


def image_decoder(backend: Backend, device: str, where: Where) -> ImageDecoder | None:
    """Return the device's decoder, if one is wanted. Raises BackendUnavailableError if it must decode and cannot."""
    if where == "host":
        return None
    decoder = backend.image_decoder(device)
    if decoder is None and where == "device":
        raise BackendUnavailableError(f"{device} decodes no images: choose --decode host, or auto.")
    return decoder


def agreed(
    decoder: ImageDecoder | None, model: Model, executable: Executable, where: Where
) -> tuple[DeviceDecoding | None, DecodedBy]:
    """Decide whether the device decodes a model's images, by trial on probes, and return what is said of it.

    Raises WrongAnswersError or BackendError if `where` wants the device and it must not decode; DeviceLostError.
    """
    if where == "host" or not isinstance(model, PixelModel):
        return None, DecodedBy("host", "", {})
    if decoder is None:
        return None, DecodedBy("host", "the device decodes no images", {})
    if model.geometry(640, 480) is None:
        return None, DecodedBy("host", "only its adapter knows how images are placed", {})
    decoding = DeviceDecoding(decoder, model)
    try:
        found = decoding.tried(executable)
    except DeviceLostError:
        raise
    except BackendError as error:
        if where == "device":
            raise type(error)(f"{model.name}: {error}: choose --decode host, or auto.") from error
        log.warning("%s: images are decoded on the host: %s", model.name, error)
        return None, DecodedBy("host", str(error), {})
    errors = ", ".join(f"{name} {error:.2g}" for name, error in found.items())
    log.info("%s: JPEG files are decoded by %s; errors against the host's: %s", model.name, decoder.name, errors)
    return decoding, DecodedBy("device", "", found)


class DeviceDecoding:
    """Decoder of a model's images on its device. Owned by the thread that owns the device."""

    def __init__(self, decoder: ImageDecoder, model: PixelModel) -> None:
        self._decoder, self._model = decoder, model

    def tried(self, executable: Executable) -> dict[str, float]:
        """Return errors of answers to probes against the host's. Raises WrongAnswersError, BackendError."""
        pixels = self.decoded(probe_files())
        return dict(errors_of_decoding(self._model, executable, decoded_by_host(self._model), pixels))

    def decoded(self, files: Sequence[bytes]) -> Pixels:
        """Decode whole, good files to the network's input of each: uint8 [n, *input_shape]. Raises BackendError."""
        rows = [
            (row, PassedFile(read_header(file), np.frombuffer(file, np.uint8).copy())) for row, file in enumerate(files)
        ]
        placed = [item for part in _parts(rows) for item in self._placed(part)]
        pixels: Pixels = torch.stack(placed).cpu().numpy()
        return pixels

    def on_device(self, slots: Sequence[tuple[int, Pixels]]) -> tuple[dict[int, Tensor], tuple[int, ...]]:
        """Decode the files in slots. Return the network's input of each row, uint8 on the device, and the rows whose
        files cannot be decoded here. Raises DeviceLostError.
        """
        rows: list[Row] = []
        refused: list[int] = []
        for row, slot in slots:
            try:
                rows.append((row, read_file(slot)))
            except InvalidImageError:
                refused.append(row)
        found: dict[int, Tensor] = {}
        for part in _parts(rows):
            refused += self._refused(part, found)
        return found, tuple(refused)

    def _refused(self, part: Sequence[Row], found: dict[int, Tensor]) -> list[int]:
        try:
            found.update(zip((row for row, _ in part), self._placed(part), strict=True))
            return []
        except DeviceLostError:
            raise
        except Exception as error:  # Broken files, no memory: any error of a library leaves the file to the host.
            if len(part) == 1:
                log.info("%s cannot decode a file of %d bytes: %s", self._decoder.name, len(part[0][1].data), error)
                return [part[0][0]]
        half = len(part) // 2
        return self._refused(part[:half], found) + self._refused(part[half:], found)

    def _placed(self, part: Sequence[Row]) -> Tensor:
        """Decode and place files: uint8 [n, *input_shape] on the device. Raises BackendError."""
        with torch.inference_mode():
            images = self._decoder.decode([torch.from_numpy(file.data) for _, file in part])
            with translated_errors(str(self._decoder.device)):
                placed = torch.empty(
                    (len(part), *self._model.input_shape), dtype=torch.uint8, device=self._decoder.device
                )
                for out, image, (_, file) in zip(placed, images, part, strict=True):
                    header = file.header
                    geometry = self._model.geometry(header.width, header.height)
                    if tuple(image.shape) != (3, *header.stored_size[::-1]) or geometry is None:
                        raise BackendError("the JPEG contradicts its header")
                    place(_turned(image, header.orientation), geometry, out)
        return placed


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    part: list[Row] = []
    pixels = 0
    for row in rows:
        more = row[1].header.width * row[1].header.height
        if part and pixels + more > _PIXELS_AT_ONCE:
            yield part
            part, pixels = [], 0
        part.append(row)
        pixels += more
    if part:
        yield part


def _turned(stored: Tensor, orientation: int) -> Tensor:
    """Turn an image, uint8 [3, h, w], as displayed, like the host by EXIF's orientation."""
    image = stored.transpose(1, 2) if orientation >= 5 else stored
    mirrored = [axis for axis, step in enumerate(STEPS[orientation], 1) if step < 0]
    return image.flip(mirrored) if mirrored else image
