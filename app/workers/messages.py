"""What the server and a worker say to each other, over one pipe each way.

Owns: the messages, nothing else. They are small: pixels travel through the arena, outputs are already reduced.

    server ─► Begin, Load, Run, Release, Stop
    worker ─► Ready | Ended, Beat, Done, Failed, Stats, Released, HandOver, Ended
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy.typing as npt

from app.logs import Style
from app.workers.guard import Limits

if TYPE_CHECKING:
    from backends import LoadReport

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Begin:
    """To the process, before all else: what it should know before it loads any library. The arena's handle follows."""

    name: str
    environment: Mapping[str, str]
    log_style: Style
    pools: tuple[Any, ...]  # app.workers.arena.Pool


@dataclass(frozen=True, slots=True)
class Load:
    """To the worker, before all else: what to serve and how. Model i (`models.Model`; None: it is not to be loaded)
    reads pool i of the arena.

    `guard`: the memory guard's limits; `plugins`: modules to import before anything is loaded; `operator_libraries`:
    shared libraries to load after the vendor's package. `probes`: each model's items for the gate, uint8
    [n, *input_shape]; none: there is no gate. `calibrations`: each model's `Calibration` (app.precision), where
    int8 is wanted and the model has images. `cache_dir`: for what is compiled. `quick`: serve with what is ready in
    seconds; Ready says whether that left something out.
    """

    models: tuple[Any, ...]
    device: str
    engine: str
    precision: str
    batch_sizes: tuple[int, ...]
    guard: Limits = field(default_factory=Limits)
    plugins: tuple[str, ...] = ()
    operator_libraries: tuple[str, ...] = ()
    probes: tuple[Array, ...] = ()
    calibrations: tuple[Any, ...] = ()
    cache_dir: Path | None = None
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Run a batch: items in `slots` of pool `model`, each with what its request asks for, padded to `batch_size`.

    `options`: `models.Options` of images, `models.TensorOptions` of tensors.
    """

    batch_id: int
    model: int
    slots: tuple[int, ...]
    options: tuple[Any, ...]
    batch_size: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give cached memory back now; answered with a Released of the same `request`, after what came before it."""

    request: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish and end."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """How one model is served. `latency_s`: seconds a batch of each ladder size took after warm-up."""

    report: LoadReport
    latency_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Ready:
    """Every model is loaded and warm; None: one that is not to be.

    `staged`: a worker that is given more time may serve some of them faster.
    """

    device: str
    device_name: str
    loaded: tuple[Loaded | None, ...]
    staged: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker cannot start, its device is lost, or it leaks and has no memory left; `reason` is one plain sentence.
    Its process ends after this.
    """

    reason: str
    kind: Literal["lost", "leaked"] = "lost"


@dataclass(frozen=True, slots=True)
class Beat:
    """The worker's process lives and its interpreter runs, whatever its device is doing."""


@dataclass(frozen=True, slots=True)
class Done:
    """A batch's answers in order: what `Model.reduce` returned for each image, None where the network computed NaN
    or infinity; seconds the device took. `fitted`: how many images at once the device's memory held, where it did not
    hold the whole batch; else 0.
    """

    batch_id: int
    results: tuple[tuple[Array, ...] | None, ...]
    infer_s: float
    fitted: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A batch that failed; the worker lives on. `reason` is for the log."""

    batch_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """Memory was given back. `returned`: bytes by rung (see guard); `request`: whose wish it was, 0 the guard's."""

    trigger: str
    returned: Mapping[int, int]
    request: int = 0


@dataclass(frozen=True, slots=True)
class HandOver:
    """The worker wants to be replaced: it holds memory that only its end gives back. It serves on meanwhile."""

    trigger: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Bytes of device memory by kind and of the worker itself, and what the device says of itself (NaN: nothing).

    `fallbacks`: how often each operator ran on the CPU because the device lacks it, since the worker began.
    """

    allocated: int
    reserved: int
    used: int
    total: int
    resident: int
    utilization_ratio: float
    power_watts: float
    energy_joules: float
    temperature_celsius: float
    fallbacks: Mapping[str, int] = field(default_factory=dict)
