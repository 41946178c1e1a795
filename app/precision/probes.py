"""Images on which a model is tried before it serves: probes for the gate, calibration and held-out images for int8.

Owns: the sources of these images, which are placed as those of requests are. Must not know engines.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from app.images.header import ImageError, read_header
from models import Model, NormalisedModel, PixelModel, Placement, TensorModel

if TYPE_CHECKING:
    from torch import Tensor

Pixels = npt.NDArray[np.uint8]

_CALIBRATION = 128
"""Images for int8: more made no difference on the sample weights (docs/precision.md)."""
_HELD_OUT = 256
"""Images to measure int8's accuracy on: one of them is 0.4 points of top-1."""
_LEAST = 8
"""Images from which on some are held out: of one alone every error is all or nothing."""
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


class CalibrationError(Exception):
    """Images to calibrate on are missing; the message says what to do."""


def probes(model: Model) -> Pixels:
    """Return the probes of the task or tensor model, else the images that come with anychip, two of them mirrored.

    uint8 [n, *input_shape].
    """
    if isinstance(model, NormalisedModel):
        return model.items(probes(model.image_model))
    if isinstance(model, TensorModel):
        return model.probes()
    assert isinstance(model, PixelModel)
    own = model.adapter.probes()
    images = own or [np.array(Image.open(io.BytesIO(file))) for file in probe_files()]
    pixels = np.stack([placed(model, _tensor(image))[0] for image in images])
    return pixels if own else np.concatenate([pixels, pixels[:2, :, ::-1]])


def probe_files() -> list[bytes]:
    """Return the images that come with anychip: photographs' sizes, 4:2:0."""
    from models.sample import IMAGES

    return [path.read_bytes() for path in sorted(IMAGES.glob("*.jpg"))]


def decoded_by_host(model: PixelModel) -> Pixels:
    """Return the network's input of each probe file: uint8 [n, *input_shape]."""
    return np.stack([seen(model, file)[0] for file in probe_files()])


def calibration(model: Model, folder: str) -> Calibration | None:
    """Return images for int8; None for a tensor model, served in another precision. Raises CalibrationError."""
    return Calibration(model, folder) if isinstance(model, PixelModel) else None


@dataclass(frozen=True)
class HeldOut:
    """Images that int8 was not calibrated on."""

    pixels: Pixels  # uint8 [n, *model.input_shape]
    placements: tuple[Placement, ...]


class Calibration:
    """Images that resemble those of requests, decoded on demand. Picklable: the worker decodes them, not the server."""

    def __init__(self, model: PixelModel, folder: str) -> None:
        """Choose the images of `folder`. Raises CalibrationError if there are none."""
        self._model = model
        if not folder:
            raise CalibrationError(
                f"int8 needs images like those {model.name} will see: name a folder of them, --calibrate DIR."
            )
        files = images_in(Path(folder))
        if not files:
            raise CalibrationError(f"There is no image in {folder} to calibrate on.")
        # Folders are often sorted by class, so both sets are spread over the whole folder.
        chosen = spread(files, _CALIBRATION + _HELD_OUT)
        enough = len(chosen) >= 2 * _CALIBRATION
        held_out = [row % 3 != 0 if enough else row % 4 == 3 and len(chosen) >= _LEAST for row in range(len(chosen))]
        self._files = spread([path for path, held in zip(chosen, held_out, strict=True) if not held], _CALIBRATION)
        self._held_out = [path for path, held in zip(chosen, held_out, strict=True) if held]

    @property
    def files(self) -> tuple[Path, ...]:
        """Return all files that are read."""
        return (*self._files, *self._held_out)

    @property
    def key(self) -> str:
        """Return a cache key: a hash of the files' names, sizes and times, without reading them."""
        facts = [(str(path), status.st_size, status.st_mtime_ns) for path in self._files for status in [path.stat()]]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def __call__(self) -> Pixels:
        """Return uint8 [n, *model.input_shape], n at most 128. Raises CalibrationError, OSError."""
        pixels = [out for out, _ in self._read(self._files)]
        if not pixels:
            raise CalibrationError("None of the images to calibrate on can be read.")
        return np.stack(pixels)

    def held_out(self) -> HeldOut | None:
        """Return other images, at most 256; None if the folder has too few to spare any. Raises OSError."""
        found = list(self._read(self._held_out))
        if not found:
            return None
        pixels, placements = zip(*found, strict=True)
        return HeldOut(np.stack(pixels), placements)

    def _read(self, files: Sequence[Path]) -> Iterator[tuple[Pixels, Placement]]:
        for path in files:
            try:
                yield seen(self._model, path.read_bytes())
            except ImageError:  # One broken file among many is skipped.
                continue


def images_in(folder: Path) -> list[Path]:
    """Return the image files below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)


def spread(files: Sequence[Path], count: int) -> list[Path]:
    """Return at most `count` of `files`, evenly spaced."""
    count = min(count, len(files))
    return [files[row * len(files) // count] for row in range(count)]


def _tensor(image: Pixels) -> Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(image))


def placed(model: PixelModel, image: Tensor) -> tuple[Pixels, Placement]:
    """Return a network's input for a fully decoded image, and the image's placement in it."""
    out = _tensor(np.zeros(model.input_shape, np.uint8))
    return out.numpy(), model.preprocess(image, out, image.shape[1], image.shape[0])


def seen(model: PixelModel, encoded: bytes) -> tuple[Pixels, Placement]:
    """Return a network's input for an image file, and the image's placement in it. Raises ImageError."""
    from app.images.decoding import decode

    header = read_header(encoded)
    out = _tensor(np.zeros(model.input_shape, np.uint8))
    size = model.decode_size(header.width, header.height)
    placement = model.preprocess(decode(encoded, header, size), out, header.width, header.height)
    return out.numpy(), placement
