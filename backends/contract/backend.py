"""Contract between the service and a vendor's hardware: plain data types, and the choice of a backend as data.

Must not know images, models or HTTP: a network is an nn.Module with an input shape. Must not import torch: the server
has none.
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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from backends.contract.errors import BackendError, BackendUnavailableError, translated_errors
from backends.simulated import simulates
from backends.vendors.table import Facts

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Array = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]
Form = Literal["pixels", "onnx", "program", "script", "openvino", "finished"]
"""Form of a network: a PyTorch module over images, or a kind of file (TensorNetwork, FinishedNetwork).

`openvino`: a module that calls, once for one item, another one within it that OpenVINO alone computes and that names
its file as `openvino_file`.
"""


@dataclass(frozen=True)
class Probe:
    """Result of a backend's probe. `reason` is empty if it can be used, else one sentence with the remedy.

    `here`: True if there is any trace of the vendor, a card's driver or its software; without one nothing is broken.
    `silent`: devices that do not answer, by id, with the reason; they are not among `Backend.devices`.
    """

    available: bool
    reason: str = ""
    here: bool = True
    silent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """Device of a backend. `id`: value for `--device`, e.g. `cpu:0`; `auto_precision`: for `--precision auto`."""

    id: str
    name: str
    memory_bytes: int
    auto_precision: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Bytes on the device: `allocated` in tensors, `reserved` by the allocator, `used` of `total` by all processes."""

    allocated: int
    reserved: int
    used: int
    total: int


@dataclass(frozen=True)
class Telemetry:
    """Figures of a device; NaN if it does not report one.

    `healthy`, `heat_throttled`, `power_throttled`: 1 or 0. The device or its driver counts errors from a start of its
    own: only differences have a meaning. `driver_errors`: faults the driver reports of the device (XIDs).
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
    """Network that a backend can load: a module over uint8 [n, *input_shape] that returns a tuple of tensors."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one item, in bytes: [height, width, 3] for images."""

    def cast(self, dtype: torch.dtype) -> Any:
        """Cast the weights in place, leaving normalisation and decoding in float32."""

    def __call__(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Compute uint8 [n, *input_shape] -> outputs, each [n, ...]."""


class TensorNetwork(Network, Protocol):
    """Network of several tensors, which lie packed in each item: input_shape is (bytes of an item,).

    `form`: the kind of `file`: `onnx`, a `program` of torch.export, a `script`. An ONNX file is no PyTorch module:
    calling that network only gives the reference. `core`: the graph itself, over one tensor an input; `inputs`: each
    one's `name`, NumPy's `dtype`, the `shape` of one item, and the `limits` of its numbers, if stated; `places`: each
    input's place in an item. If `batched` is False, the graph takes tensors without the batch axis, and a batch is one
    item.
    """

    form: Form
    file: str
    core: Any
    inputs: Sequence[Any]
    places: Sequence[tuple[int, int]]
    batched: bool


class FinishedNetwork(Network, Protocol):
    """Network over images whose `file` holds the output of a vendor's compiler; its form is `finished`.

    The host computes the parts before and after the file.
    """

    file: str

    def prepare(self, pixels: Tensor) -> Tensor:
        """Convert uint8 [n, *input_shape] -> float32 [n, 3, height, width], for a file that does not take bytes."""

    def finish(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Convert the file's outputs -> those of the network."""


class Unbuilt:
    """Network that is built when needed: an engine with a compiled copy does not need it, which saves a second."""

    def __init__(
        self, input_shape: tuple[int, ...], build: Callable[[], Network], form: Form = "pixels", **known: Any
    ) -> None:
        """Keep what is `known`: attributes of the network, such as a TensorNetwork's `inputs` and `places`."""
        self.input_shape, self.form = input_shape, form
        self._build = build
        vars(self).update(known)

    @cached_property
    def built(self) -> Network:
        """Return the network; raises the errors of building it."""
        return self._build()

    def cast(self, dtype: torch.dtype) -> Any:
        return self.built.cast(dtype)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return self.built(pixels)


def built(network: Network) -> Network:
    """Return the network itself, if it may still be Unbuilt."""
    return network.built if isinstance(network, Unbuilt) else network


@dataclass(frozen=True)
class Started:
    """Batch in flight: `outputs` waits for its arrays, which are valid until two more batches have started."""

    outputs: Callable[[], tuple[Array, ...]]


class Executable(ABC):
    """Network made ready on a device by an engine, for fixed batch sizes. It only runs; a LoadReport describes it.

    It checks its input and raises the contract's errors; an engine adds `_execute`. Owned by one thread. `device`:
    where it runs. `batch_sizes`: those it takes, ascending. `depth`: most batches in flight at once; if it is 1,
    `start` returns when the batch is done. `takes_rows`: True if there is `start_rows`. `fastest_s`: the shortest
    seconds of a batch of each size so far, from `run` to its answers.
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
        """Return its own zeros, uint8 [rows, *input_shape], in memory from which the device copies fastest."""
        return np.zeros((rows, *self._input_shape), dtype=np.uint8)

    def start(self, pixels: Pixels) -> Started:
        """Begin `run`. Wait for batches in the order of their starts; do not change `pixels` before that.

        Raises the errors of `run`, now or while waiting.
        """
        outputs = self.run(pixels)
        return Started(lambda: outputs)

    def start_rows(self, rows: Sequence[Pixels | Tensor], size: int) -> Started:
        """Begin a batch of `size` whose first items lie apart: each uint8 [*input_shape], in the host's memory,
        unchanged until the batch is done, or on the device, made by its current stream. The rest is zeros.

        Raises the errors of `start`.
        """
        raise NotImplementedError

    def run(self, pixels: Pixels) -> tuple[Array, ...]:
        """Compute uint8 [n, *input_shape], n in `batch_sizes`, C-contiguous -> outputs, each [n, ...], on the host.

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
        """Check pixels; `size`: of the batch, if they are a part of it."""
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
        """Release all resources. Idempotent."""
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
    """Report on the load of a network on a device.

    `engine`, its `version` and the `precision`: those that serve. `refusals`: reasons why preferred engines do not, by
    engine, or by engine and precision. `rejected`: the engines, each with its precision, whose answers the gate found
    wrong. `measures`: the gate's errors of the engine that serves. `staged`: slow engines were left out
    (CompileOptions.quick). `operators`: those that the device lacks, with their substitute: the `cpu`, or
    `vendor-cpu`, the CPU by the vendor's choice.
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
    """Result of `Backend.load`."""

    executable: Executable
    report: LoadReport


def _accept(executable: Executable, report: LoadReport) -> Mapping[str, float]:
    for size in executable.batch_sizes:
        executable.run(executable.buffer(size))
    return {}


class EngineRefusal(NamedTuple):
    """Reason for which an engine was refused. `wrong`: its answers were; else it could not convert the network."""

    reason: str
    wrong: bool


@dataclass(frozen=True)
class CompileOptions:
    """Options to make a network ready.

    `gate`: takes an executable and the report so far (engine, version, precision), runs it at every batch size and
    returns its measures, or raises WrongAnswersError: then the next engine or precision is tried. `refused`: how an
    engine was refused before, in a precision and for batch sizes: it is not tried again while another one serves.
    `unfit`: told that an engine has raised NotConvertedError, and why. `calibration`: images like those to come, uint8
    [n, height, width, 3], which int8 needs. `cache_dir`: folder for compiled networks; `key`: identifies the network in
    it (its weights' hash), `calibration_key` the images. `quick`: leave out engines that take more than seconds.
    `batch_sizes`: those to compile, ascending. `automatic`: the user has not named the precision, so that a finer one
    does for engines that lack it.
    """

    gate: Callable[[Executable, LoadReport], Mapping[str, float]] = _accept
    refused: Callable[[str, str, Sequence[int]], EngineRefusal | None] = lambda *_: None
    unfit: Callable[[str, str, Sequence[int], str], None] = lambda *_: None
    calibration: Callable[[], Pixels] | None = None
    cache_dir: Path | None = None
    key: str = ""
    calibration_key: str = ""
    quick: bool = False
    batch_sizes: tuple[int, ...] = ()
    automatic: bool = False


DEFAULTS = CompileOptions()


def form_of(network: Network) -> Form:
    """Return the form of a network."""
    form: Form = getattr(network, "form", "pixels")
    return form


def wanted(
    backend: Backend, device: str, precision: str, options: CompileOptions
) -> tuple[tuple[str, ...], CompileOptions]:
    """Return the precisions to try on a device, the wanted one first and after too much loss a finer one, and the
    options with what `auto` means.

    Raises BackendUnavailableError, which names the device, if it is not there.
    """
    known = {each.id: each for each in backend.devices()}
    if device not in known:
        raise BackendUnavailableError(f"There is no device {device!r}; there is {', '.join(known)}.")
    preferred = known[device].auto_precision
    chosen = preferred if precision == "auto" else precision
    steps = ("int8", preferred, "fp32") if chosen == "int8" else (chosen, "fp32")
    return tuple(dict.fromkeys(steps)), replace(options, automatic=precision == "auto")


class ImageDecoder(ABC):
    """Decoder of JPEG files on one device. Owned by the device's thread. `name`: for people.

    It decodes at full size and turns nothing. The caller has looked at the files' headers: app.images.header chooses
    the kinds of JPEG. The host decodes files that it cannot read.
    """

    name: str

    def __init__(self, device: str) -> None:
        import torch

        self.device = torch.device(device)

    @abstractmethod
    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Decode JPEG files, uint8 [bytes] each on the host -> pixels as stored, uint8 [3, h, w] each on the device.

        All or none: raises BackendError if any of them cannot be decoded, and can still decode later ones;
        OutOfDeviceMemoryError, DeviceLostError.
        """


class Backend(ABC):
    """Backend of one vendor: eight members that each has, and three with a default.

    For a device type of PyTorch, TorchBackend has them all: its vendor brings a row and DeviceHooks.
    """

    name: str
    facts: Facts

    @abstractmethod
    def probe(self) -> Probe:
        """Check cheaply if the backend can be used here; cannot raise; creates no device context."""

    @abstractmethod
    def devices(self) -> list[Device]:
        """Return the devices this process may use. Raises BackendUnavailableError."""

    @abstractmethod
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
        device's `auto_precision`. If the gate finds an engine's answers wrong, the next engine is tried, and after the
        last one a finer precision: the report has the result (`wanted` and `compile_first` do this). Raises
        BackendUnavailableError (no such device), EngineRefusedError (naming every refusal), OutOfDeviceMemoryError,
        ValueError (batch sizes).
        """

    @abstractmethod
    def memory(self, device: str) -> Memory:
        """Return the device's memory now, in bytes."""

    @abstractmethod
    def release_cache(self, device: str) -> int:
        """Give cached memory back to the device or the host; return the bytes. Not for the request path."""

    @abstractmethod
    def telemetry(self, device: str) -> Telemetry:
        """Return the device's figures now."""

    def beside(self, device: str) -> AbstractContextManager[object]:
        """Return a context for a second thread on the device: it takes no memory that the first one may still read."""
        return nullcontext()

    def image_decoder(self, device: str) -> ImageDecoder | None:
        """Return the decoder of JPEG files on the device, for the process that owns it; None without one."""
        return None

    def take(self, devices: Sequence[Device]) -> None:  # noqa: B027 - Optional: not every backend detects anything.
        """Take these devices, found by another process, without asking the driver again."""


@dataclass(frozen=True)
class AbsentBackend(Backend):
    """Backend that this process cannot use: another process has found it, or it cannot be made."""

    name: str
    facts: Facts
    reason: str = "The device is another process's."

    def probe(self) -> Probe:
        return Probe(False, self.reason)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise BackendUnavailableError(self.reason)

    devices = load = memory = release_cache = telemetry = _refuse


@dataclass(frozen=True)
class Choice:
    """Backend that serves, the ids of its chosen devices, and why preferred backends were not taken.

    `found`: detection's result for all devices of the backend; `left_out`: those that do not answer, by id, with the
    reason.
    """

    backend: Backend
    devices: tuple[str, ...]
    refusals: Mapping[str, str] = field(default_factory=dict)
    found: tuple[Device, ...] = field(default=(), compare=False)
    left_out: Mapping[str, str] = field(default_factory=dict, compare=False)

    def device(self, device_id: str) -> Device:
        """Return detection's result for one device. Raises KeyError."""
        return {device.id: device for device in self.found}[device_id]

    @property
    def simulated(self) -> bool:
        """Return True if the devices are simulated; doctor, answers and reports say so."""
        return simulates(self.backend.facts.device_type)

    @property
    def vendor(self) -> str:
        """Return the vendor's name for reports and metrics."""
        return f"simulated-{self.backend.facts.vendor}" if self.simulated else self.backend.facts.vendor

    def as_data(self) -> Choice:
        """Return the choice for another process, which need not have the backend."""
        return replace(self, backend=AbsentBackend(self.backend.name, self.backend.facts))
