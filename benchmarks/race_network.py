"""What the servers of benchmarks.race have in common: the service's decoding and its network file, without a server.

Owns: how another server's workers reach them. mosec's, LitServe's and Triton's workers are as short as their own
documentation has them; what they call is here.
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
"""How long a batch is waited for, where a server has to be told."""


def settings_of(folder: str | Path) -> Settings:
    """Of the service; `folder`: where the network file lies, or will."""
    return Settings(
        weights="sample", engine="openvino", precision="int8", batch_sizes="1,2,4,8", cache_dir=Path(folder)
    )


def opened(settings: Settings) -> Model:
    """The model that all serve."""
    return open_model(parse_spec(MODEL, settings.weights), settings.weights_dir)


class Decoder:
    """Bytes of a file to the network's input, in one thread."""

    def __init__(self, weights: str = "sample") -> None:
        torch.set_num_threads(1)
        model = opened(Settings(weights=weights))
        assert isinstance(model, PixelModel)
        self._model = model

    def decode(self, data: bytes) -> npt.NDArray[np.uint8]:
        """uint8, in a batch's layout."""
        target = torch.empty(self._model.input_shape, dtype=torch.uint8)
        decode_into(self._model, data, read_header(data), target)
        return target.numpy()


class Network:
    """The network from its file, on all cores, as the service's worker runs it."""

    def __init__(self, folder: str | Path) -> None:
        settings = settings_of(folder)
        self._model = opened(settings)
        self._executable, _ = loaded(self._model, settings)

    def answers(self, pixels: list[npt.NDArray[np.uint8]]) -> list[dict[str, Any]]:
        """What is answered for each of a batch. A batch runs in the next of the sizes, as the service's do."""
        batch = np.zeros((1 << (len(pixels) - 1).bit_length(), *pixels[0].shape), np.uint8)
        batch[: len(pixels)] = pixels
        outputs = self._executable.run(batch)
        model, options = self._model, Options()
        assert isinstance(model, PixelModel)
        return [
            {"predictions": [model.postprocess(model.reduce(outputs, row, options), Placement(1, 1), options)]}
            for row in range(len(pixels))
        ]
