"""The same work in mosec, for benchmarks.feeding: images decoded as the service decodes them, and no network.

PYTHON -m benchmarks.mosec_server decode|nothing PROCESSES --port PORT

Decoding runs in PROCESSES processes and hands its pixels to one that answers with a constant, as a model would be asked
there. With `nothing` there is only that one. mosec comes with a server of its own in Rust; it is no dependency of ours.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from mosec import Server, Worker

from app.decoder.decoder import decode_into
from app.images.header import read_header
from models import PixelModel, open_model, parse_spec

MODEL = "resnet50"
ANSWER = {"predictions": []}


class Decode(Worker):
    """Bytes of a file to the network's input."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        model = open_model(parse_spec(f"{MODEL}:random"), Path())
        assert isinstance(model, PixelModel)
        self._model = model

    def deserialize(self, data: bytes) -> bytes:
        """The raw body."""
        return data

    def forward(self, data: bytes) -> np.ndarray:
        """uint8, the network's input."""
        target = torch.empty(self._model.input_shape, dtype=torch.uint8)
        decode_into(self._model, data, read_header(data), target)
        return target.numpy()


class Answer(Worker):
    """Where a network would run."""

    def deserialize(self, data: bytes) -> bytes:
        """The raw body, where nothing decodes it."""
        return data

    def forward(self, data: list[object]) -> list[object]:
        """The same for each of a batch."""
        return [ANSWER] * len(data)


if __name__ == "__main__":
    kind, processes = sys.argv.pop(1), int(sys.argv.pop(1))
    server = Server()
    if kind == "decode":
        server.append_worker(Decode, num=processes)
    server.append_worker(Answer, max_batch_size=8, max_wait_time=1)
    server.run()
