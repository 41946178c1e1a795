"""Common part of the servers of benchmarks.race: the service's decoding and its network file, without a server.

Owns: the functions for other servers' workers. mosec's, LitServe's and Triton's workers are as short as in their own
documentation; they call this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.config import Settings
from app.decoder.decoder import decode_into
from app.images.header import read_header
from benchmarks.http_load import loaded
from models import Model, Options, PixelModel, Placement, open_model, parse_spec

MODEL = "resnet50"
BATCH = 8
WAIT_S = 0.001
"""Wait for a batch to fill, for servers that need one."""


def settings_of(folder: str | Path) -> Settings:
    """Return the service's settings. `folder`: place of the network file."""
    return Settings(
        weights="sample", engine="openvino", precision="int8", batch_sizes="1,2,4,8", cache_dir=Path(folder)
    )


def opened(settings: Settings) -> Model:
    """Open the model that all serve."""
    return open_model(parse_spec(MODEL, settings.weights), settings.weights_dir)


class Decoder:
    """Decoder of a file to the network's input, in one thread."""

    def __init__(self, weights: str = "sample") -> None:
        torch.set_num_threads(1)
        model = opened(Settings(weights=weights))
        assert isinstance(model, PixelModel)
        self._model = model

    def decode(self, data: bytes) -> npt.NDArray[np.uint8]:
        """Decode to uint8, in a batch's layout."""
        target = torch.empty(self._model.input_shape, dtype=torch.uint8)
        decode_into(self._model, data, read_header(data), target)
        return target.numpy()


class Network:
    """Network from its file, on all cores, like in the service's worker."""

    def __init__(self, folder: str | Path) -> None:
        settings = settings_of(folder)
        self._model = opened(settings)
        self._executable, _ = loaded(self._model, settings)

    def answers(self, pixels: list[npt.NDArray[np.uint8]]) -> list[dict[str, Any]]:
        """Return the answers of a batch. It runs in the next larger size, like the service's batches."""
        batch = np.zeros((1 << (len(pixels) - 1).bit_length(), *pixels[0].shape), np.uint8)
        batch[: len(pixels)] = pixels
        outputs = self._executable.run(batch)
        model, options = self._model, Options()
        assert isinstance(model, PixelModel)
        return [
            {"predictions": [model.postprocess(model.reduce(outputs, row, options), Placement(1, 1), options)]}
            for row in range(len(pixels))
        ]
