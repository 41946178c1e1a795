"""The same work in mosec, for benchmarks.feeding and benchmarks.race.

PYTHON -m benchmarks.mosec_server one|two|decode PROCESSES --port PORT
PYTHON -m benchmarks.mosec_server FOLDER PROCESSES --port PORT

`one`: one process answers with a constant, in place of a model. `two`: PROCESSES processes in front of
it hand the bodies on. `decode`: these decode like the service, and hand on pixels. With a FOLDER the network
file in it answers. mosec has its own server in Rust; it is no dependency of ours.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import numpy.typing as npt
from mosec import Server, Worker

from benchmarks.race_network import BATCH, WAIT_S, Decoder, Network

_KIND = "RACE_KIND"
"""Variable for mosec's processes, which are spawned and have none of this module's variables."""


class Raw(Worker):
    """Worker that takes the body as it is."""

    def deserialize(self, data: bytes) -> bytes:
        """Return the raw body."""
        return data


class Hand(Raw):
    """Worker that hands the body on."""

    def forward(self, data: bytes) -> bytes:
        """Return the body unchanged."""
        return data


class Decode(Raw):
    """Worker that decodes a file to the network's input."""

    def __init__(self) -> None:
        self._decoder = Decoder("random" if os.environ[_KIND] == "decode" else "sample")

    def forward(self, data: bytes) -> npt.NDArray[np.uint8]:
        """Decode a file to uint8, the network's input."""
        return self._decoder.decode(data)


class Constant(Raw):
    """Worker in place of a network."""

    def forward(self, data: list[object]) -> list[object]:
        """Return the same answer for each of a batch."""
        return [{"predictions": []}] * len(data)


class Infer(Worker):
    """Worker with the network."""

    def __init__(self) -> None:
        self._network = Network(os.environ[_KIND])

    def forward(self, data: list[npt.NDArray[np.uint8]]) -> list[object]:
        """Return each image's classes."""
        return [*self._network.answers(data)]


if __name__ == "__main__":
    kind, processes = sys.argv.pop(1), int(sys.argv.pop(1))
    os.environ[_KIND] = kind
    server = Server()
    if kind != "one":
        server.append_worker(Hand if kind == "two" else Decode, num=processes)
    last = Constant if kind in ("one", "two", "decode") else Infer
    server.append_worker(last, max_batch_size=BATCH, max_wait_time=round(WAIT_S * 1e3))
    server.run()
