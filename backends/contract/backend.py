"""What a chip is to the rest of anychip.

Owns: the contract between the service and a vendor's hardware, its plain data types and its errors. Must not know
images, models or HTTP: a network is an nn.Module with an input shape.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from backends.contract.errors import BackendError, BackendUnavailableError, translated_errors
from backends.vendors.table import Facts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from backends.contract.image_decoder import ImageDecoder

Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]
Form = Literal["pixels", "onnx", "program", "script", "finished"]
"""What a network is made of: a module of PyTorch's over images, or what a file holds (TensorNetwork, FinishedNetwork).
"""


@dataclass(frozen=True)
class Probe:
    """Whether a backend can be used here. `reason` is empty when it can, else one sentence with the remedy.

    `here`: whether there is any trace of the vendor, a card's driver or its software: without one nothing is broken.
    """

    available: bool
    reason: str = ""
    here: bool = True


@dataclass(frozen=True)
class Device:
    """One device. `id` is what `--device` takes, e.g. `cpu:0`; `auto_precision` is what `--precision auto` means."""

    id: str
    name: str
    memory_bytes: int
    auto_precision: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Bytes on the device: `allocated` in tensors, `reserved` by the allocator, `used` of `total` by everybody."""

    allocated: int
    reserved: int
    used: int
    total: int


@dataclass(frozen=True)
class Telemetry:
    """What the device says of itself; NaN where it does not say.

    `healthy`, `heat_throttled`, `power_throttled`: 1 or 0. Errors are counted by the device or its driver, from when
    it likes: only what is added means anything. `driver_errors`: faults the driver reports of the device (XIDs).
    """

    utilization_ratio: float = nan
    power_watts: float = nan
    energy_joules: float = nan
    temperature_celsius: float = nan
    memory_temperature_celsius: float = nan
    clock_hertz: float = nan
    healthy: float = nan
    heat_throttled: float = nan
    power_throttled: float = nan
    corrected_memory_errors: float = nan
    uncorrected_memory_errors: float = nan
    driver_errors: float = nan


class Network(Protocol):
    """What a backend can load: a module over uint8 [n, *input_shape] that returns a tuple of tensors."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """What one item is, in bytes: [height, width, 3] of images."""

    def cast(self, dtype: torch.dtype) -> Any:
        """Cast the weights in place, leaving normalisation and decoding in float32."""

    def __call__(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """uint8 [n, *input_shape] -> outputs, each [n, ...]."""


class PackedTensor(Protocol):
    """One input of a TensorNetwork: its name, and NumPy's type and the shape of one item."""

    name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its elements."""


class TensorNetwork(Network, Protocol):
    """A network of several tensors, which lie packed in each item: input_shape is (bytes of an item,).

    `form`: what `file` holds: `onnx`, a `program` of torch.export, a `script`. An ONNX file is no module of PyTorch's:
    calling that network only gives the reference. `core` is the graph itself, over one tensor an input; `places` where
    each lies in an item. Where `batched` is False, the graph takes tensors without the axis of the batch, and a batch
    is one item.
    """

    form: Form
    file: str
    core: Any
    inputs: Sequence[PackedTensor]
    places: Sequence[tuple[int, int]]
    batched: bool

    def tensors(self, items: Tensor) -> tuple[Tensor, ...]:
        """uint8 [n, bytes of an item] -> what `core` takes."""


class FinishedNetwork(Network, Protocol):
    """A network over images of which `file` holds what a vendor's compiler has made; its form is `finished`.

    What comes before and after the file is computed on the host.
    """

    file: str

    def prepare(self, pixels: Tensor) -> Tensor:
        """uint8 [n, *input_shape] -> float32 [n, 3, height, width], which a file takes that does not take bytes."""

    def finish(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The file's outputs -> those of the network."""


class Unbuilt:
    """A network that is made when a caller needs more of it than its input's shape.

    An engine that kept it compiled does not; making it takes a second for ResNet50.
    """

    def __init__(self, input_shape: tuple[int, ...], build: Callable[[], Network]) -> None:
        self.input_shape = input_shape
        self._build = build

    @cached_property
    def built(self) -> Network:
        """The network; raises what making it raises."""
        return self._build()

    def cast(self, dtype: torch.dtype) -> Any:
        return self.built.cast(dtype)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return self.built(pixels)


def built(network: Network) -> Network:
    """The network itself, where it may still be Unbuilt."""
    return network.built if isinstance(network, Unbuilt) else network


@dataclass(frozen=True)
class Started:
    """A batch that is under way on a device.

    `outputs` waits for it, and returns and raises what `Executable.run` does. They are valid until two more batches
    have started.
    """

    outputs: Callable[[], tuple[Array, ...]]


class Executable(ABC):
    """A network made ready on a device by an engine, for fixed batch sizes. It only runs; a LoadReport says what it is.

    It checks its input and speaks the contract's errors; an engine adds `_execute`. Owned by one thread.
    `device`: where it runs. `batch_sizes`: those it takes, ascending.
    `depth`: how many batches may be under way at once; where it is 1, `start` returns when the batch is done.
    `takes_rows`: whether there is `start_rows`.
    `fastest_s`: the least time that a batch of each size took so far, from `run` to its answers, in seconds.
    """

    depth: int = 1
    takes_rows: bool = False

    def __init__(self, device: str, batch_sizes: tuple[int, ...], input_shape: tuple[int, ...]) -> None:
        self.batch_sizes = batch_sizes
        self.fastest_s: dict[int, float] = {}
        self.device = device
        self._input_shape = input_shape
        self._closed = False

    def buffer(self, rows: int) -> Pixels:
        """Zeros uint8 [rows, *input_shape] of its own, in memory from which the device copies fastest."""
        return np.zeros((rows, *self._input_shape), dtype=np.uint8)

    def start(self, pixels: Pixels) -> Started:
        """Begin what `run` does. Batches are waited for in the order of their beginning; till then `pixels` stay as is.

        Raises what `run` raises, now or when it is waited for.
        """
        outputs = self.run(pixels)
        return Started(lambda: outputs)

    def start_rows(self, rows: Sequence[Pixels | Tensor], size: int) -> Started:
        """Begin a batch of `size` whose first items lie apart: each uint8 [*input_shape], in the host's memory, where
        it stays as it is till the batch is done, or on the device, made by its current stream. The rest is zeros.

        Raises what `start` raises.
        """
        raise NotImplementedError

    def run(self, pixels: Pixels) -> tuple[Array, ...]:
        """uint8 [n, *input_shape] with n in `batch_sizes`, C-contiguous -> outputs, each [n, ...], on the host.

        The returned arrays are valid until the next `run`. Raises ValueError for other pixels, OutOfDeviceMemoryError,
        DeviceLostError, BackendError.
        """
        self._check(pixels)
        started_s = time.perf_counter()
        with translated_errors(self.device):
            # Engines share this memory with their runtimes, which take writable memory only.
            outputs = self._execute(np.require(pixels, requirements="W"))
        taken_s = time.perf_counter() - started_s
        self.fastest_s[len(pixels)] = min(taken_s, self.fastest_s.get(len(pixels), taken_s))
        return outputs

    def _check(self, pixels: Pixels, size: int | None = None) -> None:
        """`size`: of the batch, where these are a part of it."""
        if self._closed:
            raise BackendError(f"The executable on {self.device} is closed.")
        if pixels.dtype != np.uint8 or not pixels.flags.c_contiguous:
            raise ValueError(f"Pixels must be C-contiguous uint8, not {pixels.dtype} of strides {pixels.strides}.")
        if pixels.shape[1:] != self._input_shape:
            raise ValueError(f"Pixels must be [n, *{self._input_shape}], not {pixels.shape}.")
        size = len(pixels) if size is None else size
        if size not in self.batch_sizes:
            raise ValueError(f"A batch of {size} is not among the sizes {self.batch_sizes}.")

    def close(self) -> None:
        """Give back what the executable holds. Idempotent."""
        if not self._closed:
            self._closed = True
            self._release()

    @abstractmethod
    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        """Run one batch that has been checked."""

    @abstractmethod
    def _release(self) -> None:
        """Drop everything that holds memory; called once."""


@dataclass(frozen=True)
class LoadReport:
    """What loading a network on a device found out.

    `engine`, its `version` and the `precision`: what serves. `refusals`: why preferred engines do not, by engine, or by
    engine and precision. `rejected`: the engines, each with its precision, whose answers the gate found wrong.
    `measures`: the gate's errors of the engine that serves. `staged`: engines that take long were left out
    (CompileOptions.quick). `operators`: those that the device lacks, and what runs instead: `replaced` by others of the
    device, the `cpu`, or `vendor-cpu`, the CPU by the vendor's choice.
    """

    engine: str
    precision: str
    version: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    rejected: tuple[tuple[str, str], ...] = ()
    staged: bool = False
    operators: Mapping[str, str] = field(default_factory=dict)


class LoadedNetwork(NamedTuple):
    """What `Backend.load` returns."""

    executable: Executable
    report: LoadReport


def _accept(executable: Executable, report: LoadReport) -> Mapping[str, float]:
    """Anything that runs at all, at every batch size."""
    for size in executable.batch_sizes:
        executable.run(executable.buffer(size))
    return {}


@dataclass(frozen=True)
class CompileOptions:
    """What making a network ready may need beside the network.

    `gate`: takes an executable and the report so far (engine, version, precision), runs it at every batch size and
    returns what it has measured, or raises WrongAnswersError: then the next engine or precision is tried.
    `calibration`: images like those to come, uint8 [n, height, width, 3], which int8 needs.
    `cache_dir`: where compiled networks may be kept; `key`: what identifies the network among them (its weights' hash),
    `calibration_key` the images.
    `quick`: leave out what is not ready in seconds. `batch_sizes`: those that are compiled, ascending. `automatic`:
    nobody has named the precision, so that a finer one does for engines that lack it.
    """

    gate: Callable[[Executable, LoadReport], Mapping[str, float]] = _accept
    calibration: Callable[[], Pixels] | None = None
    cache_dir: Path | None = None
    key: str = ""
    calibration_key: str = ""
    quick: bool = False
    batch_sizes: tuple[int, ...] = ()
    automatic: bool = False


DEFAULTS = CompileOptions()


def form_of(network: Network) -> Form:
    """What a network is made of."""
    form: Form = getattr(network, "form", "pixels")
    return form


def precisions_from(precision: str, preferred: str) -> tuple[str, ...]:
    """What to try for a precision, in order: what loses too much steps up. `preferred` is the device's own."""
    steps = {"int8": ("int8", preferred, "fp32"), "fp32": ("fp32",)}.get(precision, (precision, "fp32"))
    return tuple(dict.fromkeys(steps))


class Backend(ABC):
    """One vendor. At most eight public members, for ever: what is needed next is first a private method."""

    name: str
    facts: Facts

    @abstractmethod
    def probe(self) -> Probe:
        """Cheap; cannot raise; creates no device context; says why not."""

    @abstractmethod
    def devices(self) -> list[Device]:
        """The devices this process may use. Raises BackendUnavailableError."""

    def load(
        self,
        network: Network,
        device: str,
        engine: str,
        precision: str,
        batch_sizes: Sequence[int],
        *,
        options: CompileOptions = DEFAULTS,
    ) -> LoadedNetwork:
        """Make `network` (it may be Unbuilt) ready on `device`. It is the executable's afterwards.

        `engine` may be `auto`: the first of `facts.engines` that does not refuse. `precision` may be `auto`: the
        device's `auto_precision`. Where the gate finds an engine's answers wrong, the next one is tried, and after the
        last of them a finer precision: the report says what it became. Raises BackendUnavailableError (no such
        device), EngineRefusedError (naming every refusal), OutOfDeviceMemoryError, ValueError (batch sizes).
        """
        known = {each.id: each for each in self.devices()}
        if device not in known:
            raise BackendUnavailableError(f"There is no device {device!r}; there is {', '.join(known)}.")
        preferred = known[device].auto_precision
        precisions = precisions_from(preferred if precision == "auto" else precision, preferred)
        options = replace(options, automatic=precision == "auto")
        return self._load(network, device, engine, precisions, batch_sizes, options=options)

    def _load(
        self,
        network: Network,
        device: str,
        engine: str,
        precisions: tuple[str, ...],
        batch_sizes: Sequence[int],
        *,
        options: CompileOptions,
    ) -> LoadedNetwork:
        """`load` on a device that is there. `precisions`: the one that is wanted, and those to step up to."""
        raise NotImplementedError

    @abstractmethod
    def memory(self, device: str) -> Memory:
        """Memory now, in bytes."""

    @abstractmethod
    def release_cache(self, device: str) -> int:
        """Give cached memory back to the device or the host; returns the bytes returned. Not for the request path."""

    @abstractmethod
    def telemetry(self, device: str) -> Telemetry:
        """What the device says of itself now."""

    def _held_bytes(self, device: str) -> int:
        """What is held of the device, by the best means: by this process where that is known, else by everybody.

        Its differences say what a network takes. Raises as `memory`.
        """
        memory = self.memory(device)
        return memory.allocated if self.facts.host_memory else memory.used

    def _beside(self, device: str) -> AbstractContextManager[object]:
        """In which a second thread uses the device, so that it takes no memory that the first one may still read."""
        return nullcontext()

    def _sick(self) -> Mapping[str, str]:
        """Devices that are here and do not answer, by id, with the reason. They are not among `devices`."""
        return {}

    def _image_decoder(self, device: str) -> ImageDecoder | None:
        """What decodes JPEG files on the device, in the process that owns it; None: nothing does."""
        return None

    def _take(self, devices: Sequence[Device]) -> None:  # noqa: B027 - Optional: not every backend detects anything.
        """Have these devices, which another process has found, without asking the driver for them again."""
