"""OpenVINO on CPUs.

Owns: conversion of the network and how a batch is spread over the cores. Must not know vendors, models or images.

A batch of n runs as n requests of one picture on min(n, threads) streams. One picture alone gets all threads; several
get a core each, which needs no synchronisation between the cores, lets the quicker core take more pictures when another
process disturbs one, and costs one compiled network per number of streams instead of one per batch size. Measured in
docs/performance.md, "CPU engines, measured".
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from backends.backend import Array, CompileOptions, EngineRefusedError, Executable, Network, Pixels
from backends.engines.engine import CheckedExecutable, Engine, first_line, translated_errors

_HINTS = {"fp32": "f32", "bf16": "bf16"}


class OpenVINOEngine(Engine):
    """`threads`: how many cores the compiled networks may use, together."""

    name = "openvino"
    precisions = tuple(_HINTS)

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        """As the contract says; `network` is only read."""
        try:
            import openvino
        except ImportError as error:
            raise EngineRefusedError("OpenVINO is not installed: pip install 'anychip[cpu]'") from error
        core = openvino.Core()
        if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise EngineRefusedError("OpenVINO has no bf16 kernels for this CPU")
        model = _convert(network)
        stream_counts = {size: min(size, self._threads) for size in batch_sizes}
        with translated_errors(device):
            compiled = {
                streams: core.compile_model(
                    model,
                    "CPU",
                    {
                        "INFERENCE_PRECISION_HINT": _HINTS[precision],
                        "INFERENCE_NUM_THREADS": self._threads,
                        "NUM_STREAMS": streams,
                    },
                )
                for streams in sorted(set(stream_counts.values()))
            }
            return _OpenVINOExecutable(
                self.name,
                device,
                precision,
                network.input_shape,
                {size: compiled[streams] for size, streams in stream_counts.items()},
            )


class _OpenVINOExecutable(CheckedExecutable):
    def __init__(
        self,
        engine: str,
        device: str,
        precision: str,
        input_shape: tuple[int, int, int],
        compiled: dict[int, Any],  # batch size -> compiled network, shared by sizes of as many streams
    ) -> None:
        from openvino import Tensor

        super().__init__(engine, device, precision, tuple(compiled), input_shape)
        self._tensor = Tensor
        ports = compiled[self.batch_sizes[0]].outputs
        # Requests write side by side into these, so that no output is copied.
        self._outputs: tuple[Array, ...] = tuple(
            np.empty((self.batch_sizes[-1], *list(port.shape)[1:]), port.element_type.to_dtype()) for port in ports
        )
        self._requests: dict[int, list[Any]] = {}
        shared: dict[int, list[Any]] = {}
        for size, network in compiled.items():
            requests = shared.setdefault(id(network), [])
            for row in range(len(requests), size):
                request = network.create_infer_request()
                for index, output in enumerate(self._outputs):
                    request.set_output_tensor(index, Tensor(output[row : row + 1], shared_memory=True))
                requests.append(request)
            self._requests[size] = requests[:size]

    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        requests = self._requests[len(pixels)]
        started: list[Any] = []
        try:
            for row, request in enumerate(requests):
                request.set_input_tensor(self._tensor(pixels[row : row + 1], shared_memory=True))
                request.start_async()
                started.append(request)
        finally:
            _wait(started)
        return tuple(output[: len(pixels)] for output in self._outputs)

    def _release(self) -> None:
        self._requests = {}
        self._outputs = ()


def _wait(requests: list[Any]) -> None:
    """Wait for all, then raise the first failure: none may still read the pixels when `run` returns."""
    failure: RuntimeError | None = None
    for request in requests:
        try:
            request.wait()
        except RuntimeError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _convert(network: Network) -> Any:
    """The network for one picture as an OpenVINO model.

    Through the frontend, not `openvino.convert_model`: that reports every use of it to Google Analytics unless a file
    in the home directory says no (openvino_telemetry).
    """
    from openvino import PartialShape, Type
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    shape = (1, *network.input_shape)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch deprecates the tracer that OpenVINO uses.
            decoder = TorchScriptPythonDecoder(network, example_input=(torch.zeros(shape, dtype=torch.uint8),))
            frontend = FrontEndManager().load_by_framework("pytorch")
            model = frontend.convert(frontend.load(decoder))
        parameter = model.inputs[0].get_node()
        parameter.set_element_type(Type.u8)
        parameter.set_partial_shape(PartialShape(list(shape)))
        model.validate_nodes_and_infer_types()
        batches = [port.shape[0] for port in model.outputs]
    except Exception as error:
        raise EngineRefusedError(f"OpenVINO cannot convert the network: {first_line(error)}") from error
    if any(batch != 1 for batch in batches):
        raise EngineRefusedError(f"the network answers one picture with batches of {batches}")
    return model
