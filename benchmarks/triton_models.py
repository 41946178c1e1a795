"""The same work in Triton, for benchmarks.race: a model of its Python backend.

Owns: the files of Triton's repository, and the model's work. It decodes its batch in threads and computes it: an
ensemble of two models needs a CUDA driver in the registry's build. Triton is no dependency of ours, and its Python
backend has `triton_python_backend_utils` only while it runs.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from backends.host import core_count
from benchmarks import servers
from benchmarks.race_network import BATCH, WAIT_S, Decoder, Network

_CONFIG = """
backend: "python"
input [{{ name: "image" data_type: TYPE_UINT8 dims: [-1] allow_ragged_batch: true }}]
output [{{ name: "predictions" data_type: TYPE_STRING dims: [1] }}]
max_batch_size: {batch}
dynamic_batching {{ max_queue_delay_microseconds: {wait_us} }}
instance_group [{{ kind: KIND_CPU count: 1 }}]
parameters {{ key: "folder" value: {{ string_value: "{folder}" }} }}
"""
# Triton's interpreters ignore PYTHONPATH.
_CODE = """import sys

sys.path[:0] = {paths!r}
from benchmarks.triton_models import RaceModel as TritonPythonModel
"""


def write_repository(root: Path, folder: Path) -> None:
    """Write Triton's repository. `folder`: place of the network file."""
    shutil.rmtree(root, ignore_errors=True)
    version = root / "race" / "1"
    version.mkdir(parents=True, exist_ok=True)
    config = _CONFIG.format(batch=BATCH, wait_us=round(WAIT_S * 1e6), folder=folder)
    (root / "race" / "config.pbtxt").write_text(config)
    (version / "model.py").write_text(_CODE.format(paths=servers.search_path()))


class RaceModel:
    """Model that takes files and returns classes as JSON."""

    def initialize(self, given: dict[str, str]) -> None:
        """Load the network in Triton's process."""
        self._decoder = Decoder()
        self._network = Network(json.loads(given["model_config"])["parameters"]["folder"]["string_value"])
        self._threads = ThreadPoolExecutor(core_count())

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer all requests that Triton has put together."""
        import triton_python_backend_utils as triton

        files = [triton.get_input_tensor_by_name(request, "image").as_numpy().tobytes() for request in requests]
        answers = self._network.answers([*self._threads.map(self._decoder.decode, files)])
        texts = [np.array([[json.dumps(each).encode()]], dtype=np.object_) for each in answers]
        return [triton.InferenceResponse([triton.Tensor("predictions", text)]) for text in texts]
