"""The same work in mosec, for benchmarks.feeding and benchmarks.race.

PYTHON -m benchmarks.mosec_server one|two|decode PROCESSES --port PORT
PYTHON -m benchmarks.mosec_server FOLDER PROCESSES --port PORT

`one`: a process that answers with a constant, as a model would be asked there. `two`: PROCESSES processes in front of
it, which hand the bodies on. `decode`: these decode as the service does, and hand on pixels. With a FOLDER the network
file in it answers. mosec comes with a server of its own in Rust; it is no dependency of ours.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import numpy.typing as npt
from mosec import Server, Worker

from benchmarks.race_network import BATCH, WAIT_S, Decoder, Network

_KIND = "RACE_KIND"
"""Told to mosec's processes, which begin anew and know none of the variables here."""


class Raw(Worker):
    """Takes the body as it is."""

    def deserialize(self, data: bytes) -> bytes:
        """The raw body."""
        return data


class Hand(Raw):
    """Hands it on."""

    def forward(self, data: bytes) -> bytes:
        """The same."""
        return data


class Decode(Raw):
    """Bytes of a file to the network's input."""

    def __init__(self) -> None:
        self._decoder = Decoder("random" if os.environ[_KIND] == "decode" else "sample")

    def forward(self, data: bytes) -> npt.NDArray[np.uint8]:
        """uint8, the network's input."""
        return self._decoder.decode(data)


class Constant(Raw):
    """Where a network would run."""

    def forward(self, data: list[object]) -> list[object]:
        """The same for each of a batch."""
        return [{"predictions": []}] * len(data)


class Infer(Worker):
    """Where it runs."""

    def __init__(self) -> None:
        self._network = Network(os.environ[_KIND])

    def forward(self, data: list[npt.NDArray[np.uint8]]) -> list[object]:
        """Each one's classes."""
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
