"""The eager engine: PyTorch as it is, channels-last. Runs everything, promises nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from backends.backend import Array, EngineRefusedError, Executable, Network, Pixels
from backends.engines.engine import Engine

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class EagerEngine(Engine):
    """torch's own kernels on the CPU; convolutions run in channels-last memory, which oneDNN prefers."""

    name = "eager"

    def compile(self, network: Network, precision: str, batch_sizes: Sequence[int], threads: int) -> Executable:
        """Cast the network and set torch's threads for this process."""
        if precision not in _DTYPES:
            raise EngineRefusedError(f"eager runs {' and '.join(_DTYPES)} on the CPU, not {precision}")
        torch.set_num_threads(threads)
        network.cast(_DTYPES[precision])
        module = cast(nn.Module, network).to(memory_format=torch.channels_last)
        return _EagerExecutable(module, precision, batch_sizes)


class _EagerExecutable(Executable):
    engine = "eager"

    def __init__(self, network: Any, precision: str, batch_sizes: Sequence[int]) -> None:
        self.precision = precision
        self.batch_sizes = tuple(sorted(batch_sizes))
        self._network = network

    def run(self, pixels: Pixels) -> tuple[Array, ...]:
        self.check(pixels)
        with torch.inference_mode():
            return tuple(output.numpy() for output in self._network(torch.from_numpy(pixels)))

    def close(self) -> None:
        self._network = None
