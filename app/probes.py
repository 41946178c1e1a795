"""What a model is tried on before it serves: probes for the gate, and pictures for int8 to calibrate on.

Owns: where they come from, and that they reach the network exactly as pictures of requests do. Must not know engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from app import images
from models import Model, NormalisedModel, PixelModel, TensorModel

Pixels = npt.NDArray[np.uint8]

_CALIBRATION = 128
"""Pictures for int8: more made no difference on the sample weights (docs/precision.md)."""
_SEED = 2029  # Of the sample generator: neither training nor evaluation has these pictures.
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


class CalibrationError(Exception):
    """There are no pictures to calibrate on; the message says what to do."""


def probes(model: Model) -> Pixels:
    """The pictures that come with anychip, two of them mirrored, or a tensor model's own: uint8 [n, *input_shape]."""
    from models.sample import PICTURES

    if isinstance(model, NormalisedModel):
        return model.items(probes(model.pictures))
    if isinstance(model, TensorModel):
        return model.probes()
    assert isinstance(model, PixelModel)
    pixels = np.stack([_seen(model, path.read_bytes()) for path in sorted(PICTURES.glob("*.jpg"))])
    return np.concatenate([pixels, pixels[:2, :, ::-1]])


def calibration(model: Model, folder: str) -> Calibration | None:
    """Pictures for int8; None for a tensor model, which is served in another precision. Raises CalibrationError."""
    return Calibration(model, folder) if isinstance(model, PixelModel) else None


class Calibration:
    """Pictures like those to come, decoded when they are asked for: picklable, so that a worker may ask."""

    def __init__(self, model: PixelModel, folder: str) -> None:
        """`folder`: of pictures; empty: the generator's, where the model has the sample weights.

        Raises CalibrationError.
        """
        self._model = model
        self._files = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in _SUFFIXES)
        if folder and not self._files:
            raise CalibrationError(f"There is no picture in {folder} to calibrate on.")
        if not folder and model.weights != "sample":
            raise CalibrationError(
                f"int8 needs pictures like those {model.name} will see: name a folder of them, --calibrate DIR."
            )

    def __call__(self) -> Pixels:
        """uint8 [n, *model.input_shape], n at most 128. Raises CalibrationError, OSError."""
        pixels = list(self._from_files() if self._files else self._generated())
        if not pixels:
            raise CalibrationError("None of the pictures to calibrate on can be read.")
        return np.stack(pixels)

    def _from_files(self) -> Iterator[Pixels]:
        step = max(1, len(self._files) // _CALIBRATION)
        for path in self._files[::step][:_CALIBRATION]:
            try:
                yield _seen(self._model, path.read_bytes())
            except images.ImageError:  # One broken file among many is no reason to stop.
                continue

    def _generated(self) -> Iterator[Pixels]:
        from models.sample.pictures import classification_picture, detection_picture

        draw = classification_picture if self._model.task == "classify" else detection_picture
        for index in range(_CALIBRATION):
            width, height = ((500, 375), (640, 480), (375, 500))[index % 3]
            out = torch.zeros(self._model.input_shape, dtype=torch.uint8)
            self._model.preprocess(torch.from_numpy(draw(_SEED, index, (width, height))[0]), out, width, height)
            yield out.numpy()


def _seen(model: PixelModel, encoded: bytes) -> Pixels:
    header = images.read_header(encoded)
    out = torch.zeros(model.input_shape, dtype=torch.uint8)
    size = model.decode_size(header.width, header.height)
    model.preprocess(images.decode(encoded, header, size), out, header.width, header.height)
    pixels: Pixels = out.numpy()
    return pixels
