"""The same work in BentoML, for benchmarks.race.

PYTHON -m benchmarks.bentoml_server FOLDER PROCESSES --port PORT

As its documentation shows it: a service in PROCESSES processes takes requests and decodes, and depends on a second one,
which batches. BentoML is no dependency of ours.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import bentoml
import numpy as np
import numpy.typing as npt
from bentoml.validators import ContentType

from benchmarks.race_network import BATCH, WAIT_S, Decoder, Network

_FOLDER, _PROCESSES = "RACE_FOLDER", "RACE_PROCESSES"
"""Variables for BentoML's processes, which import this module anew."""


@bentoml.service(workers=1, traffic={"timeout": 60})
class Infer:
    """Service with the network."""

    def __init__(self) -> None:
        self._network = Network(os.environ[_FOLDER])

    # BentoML rejects what it thinks it cannot answer within the latency: a minute rejects nothing here.
    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=60_000)  # type: ignore[misc, unused-ignore]
    def answers(self, images: list[npt.NDArray[np.uint8]]) -> list[dict[str, Any]]:
        """Return each image's classes."""
        return self._network.answers(images)


@bentoml.service(workers=int(os.environ.get(_PROCESSES, "1")), traffic={"timeout": 60})
class Classify:
    """Classifier of a JPEG as a body."""

    infer = bentoml.depends(Infer)

    def __init__(self) -> None:
        self._decoder = Decoder()

    @bentoml.api  # type: ignore[misc, unused-ignore]
    async def predict(self, image: Annotated[bytes, ContentType("image/jpeg")], /) -> dict[str, Any]:
        """Decode the file to uint8, the network's input, and return its classes."""
        (answer,) = await self.infer.to_async.answers([self._decoder.decode(image)])
        return answer


if __name__ == "__main__":
    os.environ[_FOLDER], os.environ[_PROCESSES] = sys.argv[1:3]
    command = ["serve", f"{__spec__.name}:Classify", "--host", "127.0.0.1", "--port", sys.argv[4]]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *command])
