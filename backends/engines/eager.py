"""PyTorch's eager mode, operator by operator: runs everywhere, and is the reference for other engines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from backends.contract.backend import Array, CompileOptions, Executable, Network, Pixels
from backends.contract.errors import first_line, translated_errors
from backends.engines.engine import DTYPES, Call, Engine
from backends.engines.fused import fuse
from backends.engines.streamed import StreamedExecutable

log = logging.getLogger(__name__)

_RUNS_TO_SETTLE = 3
_TIMED_RUNS = 5


class EagerEngine(Engine):
    """Eager mode: channels-last if wanted, no gradients, weights cast to the precision."""

    name = "eager"
    forms = ("pixels", "program", "script")

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        with translated_errors(device):
            module = placed(network, device, precision, self._facts.channels_last, batch_sizes[-1])
            if self._facts.fused_layers:
                fuse(module, lambda: batch_s(network, batch_sizes[-1], device), device, DTYPES[precision])
        kind = _HostExecutable if torch.device(device).type == "cpu" else StreamedExecutable
        return kind(device, network.input_shape, dict.fromkeys(batch_sizes, network))


def placed(network: Network, device: str, precision: str, channels_last: bool | None, size: int = 1) -> nn.Module:
    """Return the network itself, cast and moved to the device.

    If `channels_last` is None, choose the layout in which a batch of `size` takes less time.
    """
    network.cast(DTYPES[precision])
    module = cast(nn.Module, network).to(device)
    if channels_last is None:
        channels_last = _is_faster_channels_last(network, module, device, size)
    if channels_last:
        module.to(memory_format=torch.channels_last)
    return module


def _is_faster_channels_last(network: Network, module: nn.Module, device: str, size: int) -> bool:
    taken_s = []
    for layout in (torch.channels_last, torch.contiguous_format):  # The one it is left in comes last.
        try:
            module.to(memory_format=layout)
            taken_s.append(batch_s(network, size, device))
        except (RuntimeError, NotImplementedError) as error:
            if layout is torch.contiguous_format or isinstance(error, torch.OutOfMemoryError):
                raise
            log.info("%s refuses channels-last: %s", device, first_line(error))
            taken_s.append(math.inf)
    log.info("on %s a batch of %d takes %.2g s channels-last, %.2g s otherwise", device, size, *taken_s)
    return taken_s[0] < taken_s[1]


def batch_s(network: Network, size: int, device: str) -> float:
    """Return the seconds of a batch that is already on the device, after runs in which libraries choose kernels."""
    pixels = torch.zeros((size, *network.input_shape), dtype=torch.uint8, device=device)
    module = torch.get_device_module(pixels.device.type)
    with torch.inference_mode():
        for _ in range(_RUNS_TO_SETTLE):
            network(pixels)
        module.synchronize()
        started_s = time.perf_counter()
        for _ in range(_TIMED_RUNS):
            network(pixels)
        module.synchronize()
    return (time.perf_counter() - started_s) / _TIMED_RUNS


class _HostExecutable(Executable):
    def __init__(self, device: str, input_shape: tuple[int, ...], by_size: Mapping[int, Call]) -> None:
        super().__init__(device, tuple(sorted(by_size)), input_shape)
        self._by_size = by_size

    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        with torch.inference_mode():
            return tuple(output.numpy() for output in self._by_size[len(pixels)](torch.from_numpy(pixels)))

    def _release(self) -> None:
        self._by_size = {}
