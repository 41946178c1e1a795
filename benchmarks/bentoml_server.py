"""The same work in BentoML, for benchmarks.race.

PYTHON -m benchmarks.bentoml_server FOLDER --port PORT

Its worker decodes and computes, in one process, batch after batch. Two services, one that decodes and one that it
depends on, as BentoML's documentation shows them, too, are not raced: version 1.4.40 answers 500 whenever the first one
renews its connections to the second. BentoML is no dependency of ours.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import bentoml

from benchmarks.race_network import BATCH, Decoder, Network

_FOLDER = "RACE_FOLDER"
"""Variable for BentoML's process, which imports this module anew."""


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Classify:
    """Classifier of JPEGs in a form's fields `images`, the way BentoML takes files."""

    def __init__(self) -> None:
        self._decoder, self._network = Decoder(), Network(os.environ[_FOLDER])

    # BentoML refuses what it thinks it cannot answer within the latency: a minute refuses nothing here.
    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=60_000)  # type: ignore[misc, unused-ignore]
    def predict(self, images: list[Path]) -> list[dict[str, Any]]:
        """Return each image's classes."""
        return self._network.answers([self._decoder.decode(image.read_bytes()) for image in images])


if __name__ == "__main__":
    os.environ[_FOLDER] = sys.argv[1]
    command = ["serve", "benchmarks.bentoml_server:Classify", "--host", "127.0.0.1", "--port", sys.argv[3]]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *command])
