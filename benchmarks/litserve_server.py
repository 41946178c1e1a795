"""The same work in LitServe, for benchmarks.race.

PYTHON -m benchmarks.litserve_server FOLDER --port PORT

Its worker decodes and computes, in one process, batch after batch. LitServe is no dependency of ours.
"""

from __future__ import annotations

import sys
from typing import Any

import litserve
import numpy as np
import numpy.typing as npt

from benchmarks.race_network import BATCH, WAIT_S, Decoder, Network


class Classify(litserve.LitAPI):  # type: ignore[misc, unused-ignore]
    """Classifier of a JPEG in a form's field `file`, the way LitServe takes files."""

    def setup(self, device: str) -> None:
        """Load the network in the worker's process."""
        self._decoder, self._network = Decoder(), Network(sys.argv[1])

    # Not annotated: LitServe reads an annotation as the form of the body.
    def decode_request(self, request) -> npt.NDArray[np.uint8]:  # type: ignore[no-untyped-def]
        """Decode the file to uint8, the network's input."""
        return self._decoder.decode(request["file"].file.read())

    def batch(self, inputs: list[npt.NDArray[np.uint8]]) -> list[npt.NDArray[np.uint8]]:
        """Return the inputs unchanged: the network takes a list."""
        return inputs

    def predict(self, batch: list[npt.NDArray[np.uint8]]) -> list[dict[str, Any]]:
        """Return each image's classes."""
        return self._network.answers(batch)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers unchanged, one each."""
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        """Return the answer unchanged: it is JSON already."""
        return output


if __name__ == "__main__":
    api = Classify(max_batch_size=BATCH, batch_timeout=WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[3]), log_level="warning", generate_client_file=False)
