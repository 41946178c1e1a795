"""Captured graphs: the device's own record of a network's kernels, started by one call instead of one a kernel.

Input and outputs of a graph stay in place. So there is a graph for each of the two inputs that batches alternate
between, with the copies of its outputs inside; where a stack refuses those, outputs are copied after the replay.

An older form ran on an H100 (docs/hardware.md), the present one on simulated devices alone. Names and parameters are
those of torch 2.14.1 (cuda, xpu), torch_npu 2.14.0, torch_mlu 0c48821, torch_supa 68fb624; MUSAGraph is known only from
projects that use it. ROCm's and Hygon's graphs are torch.cuda's.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, NamedTuple, cast

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
from backends.engines.streamed import StreamedExecutable, copy_out, host_memory

log = logging.getLogger(__name__)

# PyTorch's documentation of CUDA graphs takes so many: libraries choose kernels and take workspaces in the first runs.
_WARM_UP_RUNS = 3
_AGREEMENT = 0.99  # Share of a graph's numbers that must be the network's; kernels need not add in the same order.


class GraphEngine(Engine):
    """Kernels of the eager engine, captured: without the time of starting each of them."""

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
                    size = batch_sizes[-1]
                    fuse(
                        cast(nn.Module, network),
                        lambda: batch_s(cast(Network, _Replayed(network, device, size, kind)), size, device),
                        device,
                        DTYPES[precision],
                    )
                # Some stacks capture kernels and no copies to the host: graphs without these serve almost as fast.
                if host_memory((1,), torch.uint8).is_pinned():
                    try:
                        with translated_errors(device):
                            return _GraphExecutable(device, network, batch_sizes, kind, copies=True)
                    except (OutOfDeviceMemoryError, DeviceLostError):
                        raise
                    except BackendError as error:
                        log.info("%s: graphs are captured without their copies to the host: %s", device, error)
                return _GraphExecutable(device, network, batch_sizes, kind, copies=False)
        except (OutOfDeviceMemoryError, DeviceLostError, EngineRefusedError):
            raise
        except BackendError as error:
            raise EngineRefusedError(f"the network cannot be captured: {error}") from error


class _Captured(NamedTuple):
    """Captured graph. `hosts`: pinned memory for its copies of its outputs; none if it does not copy."""

    graph: Any
    outputs: tuple[Tensor, ...]
    hosts: tuple[Tensor, ...]


class _Replayed:
    """Network for one batch size, by replaying a graph: for timing, before the others are captured."""

    def __init__(self, network: Network, device: str, size: int, kind: Any) -> None:
        self.input_shape = network.input_shape
        self._pixels = torch.zeros((size, *network.input_shape), dtype=torch.uint8, device=device)
        module = torch.get_device_module(torch.device(device).type)
        self._captured = _capture(network, self._pixels, module, kind, None, copies=False)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, ...]:
        self._captured.graph.replay()
        return self._captured.outputs


class _GraphExecutable(StreamedExecutable):
    def __init__(self, device: str, network: Network, batch_sizes: tuple[int, ...], kind: Any, *, copies: bool) -> None:
        # The network is kept: the graphs read its weights where they lie.
        super().__init__(device, network.input_shape, dict.fromkeys(batch_sizes, network))
        shape = (batch_sizes[-1], *network.input_shape)
        self._inputs = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(self.depth)]
        self._captured: dict[tuple[int, int], _Captured] = {}  # By the address of the input, and the size.
        module = torch.get_device_module(torch.device(device).type)
        pool = module.graph_pool_handle() if hasattr(module, "graph_pool_handle") else None
        # The largest first: the smaller ones find their memory in the pool, one for all, as one runs at a time.
        each = [self._inputs[turn][:size] for size in reversed(batch_sizes) for turn in range(self.depth)]
        for pixels in each:
            captured = _capture(network, pixels, module, kind, pool, copies=copies)
            pool = captured.graph.pool() if pool is None else pool
            self._captured[pixels.data_ptr(), len(pixels)] = captured
        for pixels in reversed(each):  # After all captures: a graph that writes into another's outputs shows.
            self._compare(network, pixels)

    def _compare(self, network: Network, pixels: Tensor) -> None:
        """Compare a replay with the network: a step on the host is not in the graph, and answers for other images."""
        noise = torch.randint(0, 256, pixels.shape, generator=torch.Generator().manual_seed(len(pixels)))
        pixels.copy_(noise.to(torch.uint8))
        expected = [output.cpu().double() for output in network(pixels)]
        hosts: list[Tensor] = []
        self._compute(pixels, hosts)
        self._module.synchronize()
        for ours, theirs in zip((host.double() for host in hosts), expected, strict=True):
            tolerance = 0.01 * float(theirs.abs().max()) if theirs.numel() else 0.0
            agree = torch.isclose(ours, theirs, rtol=0, atol=tolerance, equal_nan=True).double().mean()
            if theirs.numel() and agree < _AGREEMENT:
                raise WrongAnswersError(
                    f"the captured graph for {len(pixels)} images answers otherwise than the network: "
                    f"{1 - float(agree):.0%} of its numbers differ"
                )

    def _compute(self, on_device: Tensor, hosts: list[Tensor]) -> None:
        graph, outputs, copied_to = self._captured[on_device.data_ptr(), len(on_device)]
        graph.replay()
        hosts += copied_to
        if not copied_to:
            copy_out(outputs, hosts)

    def _release(self) -> None:
        super()._release()
        self._captured = {}


def _capture(network: Network, pixels: Tensor, module: Any, kind: Any, pool: Any, *, copies: bool) -> _Captured:
    """Capture the network; `copies`: include the outputs' copies into pinned memory, if there is such memory."""
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        for _ in range(_WARM_UP_RUNS):
            outputs = tuple(network(pixels))
    module.current_stream().wait_stream(side)
    hosts = [host_memory(output.shape, output.dtype) for output in outputs] if copies else []
    if not all(host.is_pinned() for host in hosts):
        hosts = []
    # Else another thread of the process, one that serves meanwhile, could spoil the capture by taking memory.
    named = inspect.signature(module.graph).parameters
    mode = {"capture_error_mode": "thread_local"} if "capture_error_mode" in named else {}
    graph = kind()
    with module.graph(graph, pool=pool, **mode):
        outputs = tuple(network(pixels))
        for host, output in zip(hosts, outputs, strict=False):
            host.copy_(output, non_blocking=True)
    return _Captured(graph, outputs, tuple(hosts))
