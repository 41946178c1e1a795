"""Captured graphs: the device's own record of a network's kernels, started by one call instead of one a kernel.

Owns: capture and replay, one graph a batch size. Must not know which vendor's device it is: it speaks through
`torch.get_device_module`, and is told what the device's module calls its graphs.

    copy stream      copy n+1 ──────────┐ event
    compute stream   copy n into the static input ─► replay ─► static outputs into pinned memory ─► the same for n+1

The input and the outputs of a graph stay where they were at its capture. That two batches are under way does no harm:
all of that happens on one stream, so that a replay begins when the outputs before it have been copied.

Run on an H100 (docs/hardware.md), unverified on other vendors' cards.
Names and parameters are those of torch 2.14.1 (cuda, xpu), torch_npu 2.14.0, torch_mlu 0c48821,
torch_supa 68fb624; MUSAGraph is known only from projects that use it. ROCm's and Hygon's graphs are torch.cuda's.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from backends.contract.backend import CompileOptions, Executable, Network
from backends.contract.errors import (
    BackendError,
    DeviceLostError,
    EngineRefusedError,
    OutOfDeviceMemoryError,
    WrongAnswersError,
    translated_errors,
)
from backends.engines.eager import batch_s, placed
from backends.engines.engine import DTYPES, Engine
from backends.engines.fused import fuse
from backends.engines.streamed import StreamedExecutable

# PyTorch's documentation of CUDA graphs takes so many: libraries choose kernels and take workspaces in the first runs.
_WARM_UP_RUNS = 3
_AGREEMENT = 0.99  # Share of a graph's numbers that must be the network's; kernels need not add in the same order.


class GraphEngine(Engine):
    """The kernels of the eager engine, captured: without the time that starting each of them takes."""

    name = "graph"
    forms = ("pixels", "program", "script")

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        device_type = torch.device(device).type
        module = torch.get_device_module(device_type)
        kind = getattr(module, self._facts.graph_class, None)
        if kind is None or not hasattr(module, "graph"):
            raise EngineRefusedError(f"torch.{device_type} has no captured graphs here ({self._facts.graph_class})")
        try:
            with translated_errors(device), torch.inference_mode():
                placed(network, device, precision, self._facts.channels_last, batch_sizes[-1])
                if self._facts.fused_layers:
                    # Timed when replayed, as it will serve: one by one, fewer kernels are always quicker to start.
                    largest = batch_sizes[-1:]
                    fuse(
                        cast(nn.Module, network),
                        lambda: batch_s(cast(Network, _Replayed(network, device, largest, kind)), largest[0], device),
                        device,
                        DTYPES[precision],
                    )
                replayed = _Replayed(network, device, batch_sizes, kind)
        except (OutOfDeviceMemoryError, DeviceLostError, EngineRefusedError):
            raise
        except BackendError as error:
            raise EngineRefusedError(f"the network cannot be captured: {error}") from error
        return StreamedExecutable(device, network.input_shape, dict.fromkeys(batch_sizes, replayed))


class _Replayed:
    """The network as StreamedExecutable calls it: by replaying the graph of the batch's size."""

    def __init__(self, network: Network, device: str, batch_sizes: tuple[int, ...], kind: Any) -> None:
        self.input_shape = network.input_shape
        self._network = network  # The graphs read its weights where they lie.
        # All graphs read the same memory: only one of them runs at a time.
        self._input = torch.zeros((batch_sizes[-1], *network.input_shape), dtype=torch.uint8, device=device)
        self._captured: dict[int, tuple[Any, tuple[Tensor, ...]]] = {}
        module = torch.get_device_module(torch.device(device).type)
        pool = module.graph_pool_handle() if hasattr(module, "graph_pool_handle") else None
        # The largest first: the smaller ones then find their memory in the pool.
        for size in reversed(batch_sizes):
            graph, outputs = self._capture(module, kind, size, pool)
            pool = graph.pool() if pool is None else pool
            self._captured[size] = graph, outputs
        for size in batch_sizes:  # After all captures, so that a graph which writes into another's outputs shows.
            self._compare(size)

    def _capture(self, module: Any, kind: Any, size: int, pool: Any) -> tuple[Any, tuple[Tensor, ...]]:
        pixels = self._input[:size]
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            for _ in range(_WARM_UP_RUNS):
                self._network(pixels)
        module.current_stream().wait_stream(side)
        # Else another thread of the process, one that serves meanwhile, could spoil the capture by taking memory.
        named = inspect.signature(module.graph).parameters
        mode = {"capture_error_mode": "thread_local"} if "capture_error_mode" in named else {}
        graph = kind()
        with module.graph(graph, pool=pool, **mode):
            outputs = tuple(self._network(pixels))
        return graph, outputs

    def _compare(self, size: int) -> None:
        """A step that the host does, and no kernel, is not in the graph: replayed, it answers for other images."""
        noise = torch.randint(0, 256, (size, *self.input_shape), generator=torch.Generator().manual_seed(size))
        pixels = noise.to(torch.uint8).to(self._input.device)
        expected = [output.cpu().double() for output in self._network(pixels)]
        outputs = [output.cpu().double() for output in self(pixels)]
        for ours, theirs in zip(outputs, expected, strict=True):
            tolerance = 0.01 * float(theirs.abs().max()) if theirs.numel() else 0.0
            agree = torch.isclose(ours, theirs, rtol=0, atol=tolerance, equal_nan=True).double().mean()
            if theirs.numel() and agree < _AGREEMENT:
                raise WrongAnswersError(
                    f"the captured graph for {size} images answers otherwise than the network: "
                    f"{1 - float(agree):.0%} of its numbers differ"
                )

    def __call__(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Outputs are valid until the next call on the same stream."""
        graph, outputs = self._captured[len(pixels)]
        self._input[: len(pixels)].copy_(pixels)
        graph.replay()
        return outputs
