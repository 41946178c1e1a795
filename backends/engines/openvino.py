"""The OpenVINO engine: Intel's compiler, which also is the fastest we know on AMD's CPUs.

Owns: conversion and the choice of streams. A batch of two or more is split over streams of one thread each, which need
not wait for one another in every layer; a single image gets all threads (docs/performance.md has the measurement).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from backends.backend import Array, EngineRefusedError, Executable, Network, Pixels
from backends.engines.engine import Engine

_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}


class OpenVINOEngine(Engine):
    """OpenVINO's CPU plugin."""

    name = "openvino"

    def compile(self, network: Network, precision: str, batch_sizes: Sequence[int], threads: int) -> Executable:
        """Convert once, compile a fixed shape for every ladder size."""
        if importlib.util.find_spec("openvino") is None:
            raise EngineRefusedError("openvino is not installed; pip install 'anychip[cpu]' adds it")
        if precision not in _PRECISIONS:
            raise EngineRefusedError(f"openvino runs {' and '.join(_PRECISIONS)} on the CPU, not {precision}")
        return _OpenVINOExecutable(network, precision, batch_sizes, threads)


class _OpenVINOExecutable(Executable):
    engine = "openvino"

    def __init__(self, network: Network, precision: str, batch_sizes: Sequence[int], threads: int) -> None:
        import openvino

        self.precision = precision
        self.batch_sizes = tuple(sorted(batch_sizes))
        example = torch.zeros((1, *network.input_shape), dtype=torch.uint8)
        with torch.no_grad():
            model = openvino.convert_model(
                cast(torch.nn.Module, network), example_input=example, input=[(-1, *network.input_shape)]
            )
        core = openvino.Core()
        hint = _PRECISIONS[precision]
        self._requests: dict[int, list[Any]] = {}
        for size in self.batch_sizes:
            streams = threads if size > 1 and size % threads == 0 else 1
            fixed = model.clone()
            fixed.reshape([size // streams, *network.input_shape])
            options = {
                "INFERENCE_PRECISION_HINT": hint,
                "NUM_STREAMS": str(streams),
                "INFERENCE_NUM_THREADS": str(threads),
            }
            compiled = core.compile_model(fixed, "CPU", options)
            self._requests[size] = [compiled.create_infer_request() for _ in range(streams)]

    def run(self, pixels: Pixels) -> tuple[Array, ...]:
        import openvino

        self.check(pixels)
        requests = self._requests[len(pixels)]
        for request, part in zip(requests, np.split(pixels, len(requests)), strict=True):
            request.set_input_tensor(openvino.Tensor(part, shared_memory=True))
            request.start_async()
        for request in requests:
            request.wait()
        parts = [[tensor.data for tensor in request.output_tensors] for request in requests]
        if len(parts) == 1:
            return tuple(parts[0])
        return tuple(np.concatenate(outputs) for outputs in zip(*parts, strict=True))

    def close(self) -> None:
        self._requests.clear()
