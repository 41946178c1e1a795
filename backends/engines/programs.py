"""Base of engines of compiled files: a vendor's runtime has the program, and two batches are in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from backends.contract.backend import Array, Executable, FinishedNetwork, Network, Pixels, Started, form_of
from backends.contract.errors import translated_errors
from backends.engines.engine import is_batched, unpacking

BYTES = np.dtype(np.uint8)


@dataclass(frozen=True)
class Port:
    """Input or output: its name, NumPy's type, and the shape of the whole tensor, with -1 for the batch."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Program(ABC):
    """Program that a runtime has loaded. Owned by one thread. `batch_sizes`: those it takes, ascending."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batch_sizes: tuple[int, ...]

    @abstractmethod
    def host_memory(self, size_bytes: int) -> Pixels:
        """Return zeros uint8 [size_bytes] in memory from which the device copies fastest."""

    @abstractmethod
    def start(self, size: int, arrays: Sequence[Array]) -> Callable[[], tuple[Array, ...]]:
        """Begin a batch of `size` items: an array an input, unchanged until it is done.

        Returns a function that waits for the outputs, which are valid until two more batches have started. Raises
        RuntimeError.
        """

    @abstractmethod
    def silence(self) -> str:
        """Return the reason why the device does not answer any more, "" if it does."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; called once. Does not raise."""


class ProgramExecutable(Executable):
    """Network whose program is loaded."""

    depth = 2

    def __init__(self, device: str, batch_sizes: tuple[int, ...], network: Network, program: Program) -> None:
        super().__init__(device, batch_sizes, network.input_shape)
        self._program = program
        self._finished = cast(FinishedNetwork, network) if form_of(network) == "finished" else None
        self._takes = [] if self._finished is not None else [take for _, take in unpacking(network)]
        self._batched = self._finished is not None or is_batched(network)

    def buffer(self, rows: int) -> Pixels:
        item_bytes = int(np.prod(self._input_shape))
        return self._program.host_memory(rows * item_bytes).reshape(rows, *self._input_shape)

    def start(self, pixels: Pixels) -> Started:
        self._check(pixels)
        return self._begin(pixels)

    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        return self._begin(pixels).outputs()

    def _begin(self, pixels: Pixels) -> Started:
        with translated_errors(self.device, self._program.silence):
            given = self._given(pixels)
            wait = self._program.start(len(pixels), given)

        def outputs() -> tuple[Array, ...]:
            nonlocal given
            with translated_errors(self.device, self._program.silence):
                found = wait()
            given = []  # The device has read them.
            return self._answers(found)

        return Started(outputs)

    def _given(self, pixels: Pixels) -> list[Array]:
        if self._finished is None:
            return [np.asarray(take(pixels), order="C") for take in self._takes]
        [port] = self._program.inputs
        if port.dtype == BYTES:  # The file normalises.
            return [pixels]
        with torch.inference_mode():
            planes: Array = self._finished.prepare(torch.from_numpy(pixels)).contiguous().numpy()
        return [planes.astype(port.dtype, copy=False)]

    def _answers(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        whole = [array.astype(np.float32) if array.dtype == np.float16 else array for array in arrays]
        if self._finished is None:
            return tuple(whole if self._batched else (array[None] for array in whole))
        with torch.inference_mode():
            return tuple(each.numpy() for each in self._finished.finish([torch.from_numpy(array) for array in whole]))

    def _release(self) -> None:
        self._program.close()
