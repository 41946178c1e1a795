"""Messages between the server and its workers, over one channel each, and the worker's end of it.

    server ─► Begin (app.worker.main, with the descriptors of arena and WorkerPlan), Run, Release, Stop
    worker ─► Loaded (app.core) of each model, Stats from then on, Beat, Done, Failed, Released, HandOver, Ended

Both read MessagePack, as these types and nothing else, of bounded sizes. A worker that a driver or a loaded file has
taken over can send wrong answers; it cannot make the server run anything, or count under any name.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from app.core import Count, Loaded, Name, Seconds
from app.logs import Style
from app.precision.probes import Calibration
from app.processes.channel import Channel, reader, to_packet
from backends import Device
from models import Model, Options, TensorOptions

PROGRAMS = "programs"
"""Folder in the cache with a folder for each program, named by the digest of its files: no program reads another's."""
BEAT_INTERVAL_S = 0.5
LARGEST_BATCH = 128
"""Largest batch that is tried where batches grow."""
COLLECT, CACHE, HAND_OVER = 1, 2, 3
"""Release levels: drop references and collect; the vendor's caches; another worker in place of this one."""
Policy: TypeAlias = Literal["off", "auto"] | int | float
"""Policy of the memory guard: auto, and after so many batches (int), or over a share of the device (float)."""
DEVICE_RATIO = 0.85
"""Share of the device that may be in use before a release, if the policy names no other one."""
Trigger: TypeAlias = Literal["cache", "device", "resident", "batches"]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model (None: it is not to be loaded), and how it is to be served.

    `grows`: with larger batches than these, too, if they pay (workers.load). `on_demand`: it is loaded when the
    server says so. `is_gated`: the precision gate decides. `calibration`: for int8 of a model that takes images.
    """

    model: Model | None
    engine: str
    precision: str
    batch_sizes: tuple[int, ...]
    grows: bool = False
    on_demand: bool = False
    is_gated: bool = False
    calibration: Calibration | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The models of a worker, how they are served, the environment of its process, and its limits. The model of plan i
    reads pool i of the arena.

    `device`: as the server has found it. `guard`: the memory guard's policy; `plugins`: modules to import before
    anything is loaded, and shared libraries to load after the vendor's package. `cache_dir`: for what is compiled.
    `quick`: serve with what is ready in seconds; Loaded says whether that left something out. `ballast`: makes it as
    large as a real one (docs/null.md). `decode`: where images are decoded; `auto`: on the device if it can and answers
    alike. `confined`: the process gets nothing of the service's own environment; from the first file on it may do
    little more than compute (models.confinement), and writes nothing outside `cache_dir`.

    `forks`: the process may be forked, as the environment may come when the libraries are loaded already. `serves`: the
    numbers of the models that it may have, None: all; `memory`: number of the arena's memory that they lie in.
    """

    plans: tuple[ModelPlan, ...]
    device: Device
    guard: Policy = "auto"
    plugins: tuple[str, ...] = ()
    cache_dir: Path | None = None
    quick: bool = False
    ballast: bytes = b""
    decode: Literal["host", "device", "auto"] = "host"
    confined: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    forks: bool = False
    serves: tuple[int, ...] | None = None
    memory: int = 0
    start_timeout_s: float = 600.0
    batch_timeout_s: float = 30.0
    heartbeat_timeout_s: float = 10.0
    log_style: Style = ("info", "auto")

    @property
    def models(self) -> tuple[Model | None, ...]:
        """The models by their numbers."""
        return tuple(plan.model for plan in self.plans)

    def has(self, index: int) -> bool:
        """Return True if the worker may have the model of this number."""
        return self.serves is None or index in self.serves

    def with_models(self, models: Sequence[Model | None]) -> WorkerPlan:
        """Return the same plan for other models, of which it takes its own."""
        own = [model if self.has(index) else None for index, model in enumerate(models)]
        return replace(self, plans=tuple(replace(each, model=own[index]) for index, each in enumerate(self.plans)))


class Run(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Order to run a batch: items in `slots` of pool `model`, each with its options, padded to `batch_size`.

    `options`, or `tensor_options` of a model of tensors: of each item, or one for all. `files`: the positions of items
    whose slots hold a file, for the device to decode.
    """

    batch_id: int
    model: int
    slots: tuple[int, ...]
    options: tuple[Options, ...]
    batch_size: int
    files: tuple[int, ...] = ()
    tensor_options: tuple[TensorOptions, ...] = ()

    def asked(self) -> list[Options | TensorOptions]:
        """Return the options of each item."""
        given: list[Options | TensorOptions] = [*self.options, *self.tensor_options]
        return given * len(self.slots) if len(given) == 1 else given


class Release(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Order to release cached memory now; answered with a Released of trigger "request", after what came before it."""


class LoadModel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Order to load the model of this number beside those that serve; answered with Loaded or NotLoaded."""

    model: int


class UnloadModel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Order to free the memory of the model of this number, with no batch in flight; answered with a ModelUnloaded."""

    model: int


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Order to finish and end."""


class NotLoaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that the model of this number cannot be loaded."""

    model: int
    reason: str


class ModelUnloaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that the memory of the model of this number is free."""

    model: int


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker's last message: it cannot start, its device is lost, or it leaks and has no memory left; its process
    then ends. `reason` is one plain sentence.
    """

    reason: str
    kind: Literal["lost", "leaked"] = "lost"


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sign that the worker's process lives and its interpreter runs, whatever its device is doing."""


ArrayLayout: TypeAlias = tuple[Name, Annotated[tuple[int, ...], msgspec.Meta(max_length=64)]]
"""NumPy's name of an array's type, and its shape."""


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a batch is done: its results are in `small`, or in memory of their own (app.worker.results).

    `results`, in order: the layout of what `Model.reduce` returned for each item, or one for all; None if the network
    computed NaN or infinity. `infer_s`: seconds the device took. `fitted`: how many items at once the device's memory
    held, if it did not hold the whole batch; else 0. `large_bytes`: the size of the memory whose descriptor comes with
    this; 0: there is none. `prepare_s`: seconds the worker took to
    begin the batch while it computed the one before. `undecoded`: the positions of items whose files the device could
    not decode: they have no results.
    """

    batch_id: int
    results: tuple[Annotated[tuple[ArrayLayout, ...], msgspec.Meta(max_length=1024)] | None, ...]
    infer_s: Seconds
    fitted: Count = 0
    large_bytes: Count = 0
    prepare_s: Seconds = 0.0
    undecoded: tuple[int, ...] = ()
    small: bytes = b""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that a batch failed; the worker lives on. `reason` is for the log."""

    batch_id: int
    reason: str


class Released(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report of released memory, by level (app.worker.memory). `returned`: the device's bytes; `host`: what its
    worker lost of its resident set meanwhile.
    """

    trigger: Literal[Trigger, "request", "out_of_memory"]
    returned: Annotated[dict[int, int], msgspec.Meta(max_length=8)]
    host: Annotated[dict[int, int], msgspec.Meta(max_length=8)]


class HandOver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request to be replaced: the worker holds memory that only its end gives back. It serves on meanwhile."""

    trigger: Trigger


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Bytes of device memory by kind (backends.Memory) and of the worker itself, and what its telemetry knows, by name.

    The first says that every model of the start is loaded and warm. `fallbacks`: runs of operators on the CPU.
    """

    allocated: int
    reserved: int
    used: int
    total: int
    resident: int
    telemetry: Annotated[dict[Name, float], msgspec.Meta(max_length=256)] = {}
    fallbacks: Annotated[dict[Name, int], msgspec.Meta(max_length=1024)] = {}


ToWorker: TypeAlias = Run | Release | LoadModel | UnloadModel | Stop
FromWorker: TypeAlias = Loaded | NotLoaded | ModelUnloaded | Ended | Beat | Done | Failed | Stats | Released | HandOver

_read = reader(ToWorker)


class ServerLink:
    """The worker's end of the channel; beats are sent while its context is open."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._received: deque[ToWorker] = deque()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> ServerLink:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._heart.join()

    def send(self, message: FromWorker, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises ConnectionError if the server is gone, ChannelError if it has not read for long."""
        with self._lock:
            self._channel.send(to_packet((message,)), descriptors)

    def receive(self, timeout_s: float) -> ToWorker | None:
        """Return the next message, None if none came in time. Raises EOFError, ConnectionError."""
        ends_s = time.monotonic() + timeout_s
        while not self._received:
            left_s = ends_s - time.monotonic()
            if not self._waited(left_s) and left_s <= 0:
                return None
        return self._received.popleft()

    def flush(self, timeout_s: float) -> None:
        """Send what still waits before the end, if the server reads. Raises EOFError, ConnectionError."""
        ends_s = time.monotonic() + timeout_s
        while self._channel.waiting and time.monotonic() < ends_s:
            self._waited(ends_s - time.monotonic())

    def _waited(self, timeout_s: float) -> bool:
        readable, writable = self._channel.wait(timeout_s)  # Without the lock: the heart must beat meanwhile.
        with self._lock:
            if writable:
                self._channel.flush()
            if readable:
                self._received.extend(message for packet in self._channel.receive() for message in _read(packet))
        return readable or writable

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # The server is gone: the other thread notices it too.
            while not self._stop.wait(BEAT_INTERVAL_S):
                if not self._channel.waiting:
                    self.send(Beat())
