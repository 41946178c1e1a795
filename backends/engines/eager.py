"""PyTorch as it is, operator by operator: runs everywhere, and is the reference that other engines are compared with.

Owns: memory format and precision. Must not know which vendor's device it runs on.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from backends.backend import Array, CompileOptions, Executable, Network, Pixels
from backends.engines.engine import DTYPES, CheckedExecutable, Engine
from backends.engines.streamed import StreamedExecutable
from backends.faults import translated_errors


class EagerEngine(Engine):
    """Channels-last where it is wanted, no gradients, weights cast to the precision."""

    name = "eager"
    forms = ("pixels", "program", "script")

    def __init__(self, precisions: tuple[str, ...], channels_last: bool = True) -> None:
        """`precisions`: those that are worth having on the backend's devices. `channels_last`: where they take it."""
        self.precisions = precisions
        self._channels_last = channels_last

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        """Casts and moves `network` in place."""
        with translated_errors(device):
            placed(network, device, precision, self._channels_last)
        return torch_executable(device, batch_sizes, network)


def placed(network: Network, device: str, precision: str, channels_last: bool) -> nn.Module:
    """The network itself, cast and moved to the device."""
    network.cast(DTYPES[precision])
    module = cast(nn.Module, network).to(device)
    if channels_last:
        module.to(memory_format=torch.channels_last)
    return module


def torch_executable(device: str, batch_sizes: tuple[int, ...], network: Network) -> Executable:
    """What is called with tensors and answers with tensors as an executable; on devices, one that copies meanwhile."""
    kind = _HostExecutable if torch.device(device).type == "cpu" else StreamedExecutable
    return kind(device, batch_sizes, network)


class _HostExecutable(CheckedExecutable):
    def __init__(self, device: str, batch_sizes: tuple[int, ...], network: Network) -> None:
        super().__init__(device, batch_sizes, network.input_shape)
        self._network: Network | None = network

    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        assert self._network is not None
        with torch.inference_mode():
            return tuple(output.numpy() for output in self._network(torch.from_numpy(pixels)))

    def _release(self) -> None:
        self._network = None
