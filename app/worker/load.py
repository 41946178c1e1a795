"""Loading in the worker: every model is made ready on the device, tried and warm, and reported.

    1,2,4,8 ─► does 8 pay over 4? ─► 16 ─► 32 ─► … till one does not pay, does not fit, or is refused

A start never waits for larger batches: a provisional worker serves meanwhile, and one beside it tries them.
A thread loads and unloads models on demand beside those that serve, one at a time; the thread that serves asks, and
never waits.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import logging
import math
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from app.core import Loaded
from app.precision.described import weights_key
from app.precision.gate import compile_options, what_computes
from app.precision.probes import Pixels, probes
from app.worker.device_decoding import agreed, image_decoder
from app.worker.messages import (
    LARGEST_BATCH,
    PROGRAMS,
    ModelPlan,
    ModelUnloaded,
    NotLoaded,
    ServerLink,
    WorkerPlan,
)
from backends import (
    Backend,
    BackendError,
    DeviceLostError,
    EngineRefusedError,
    Executable,
    LoadedNetwork,
    LoadReport,
    Memory,
    Unbuilt,
    open_backend,
    private_folder,
)
from backends.contract.backend import ImageDecoder, Network
from backends.vendors.drivers import driver_version, toolkit_version
from models import Model, ModelError, PixelModel, TensorModel
from models.confinement import confine_program, python_files, what_there_is
from models.exports.library_files import builder, library_of

_WARM_UP_RUNS = 2
_SWITCH_INTERVAL_S = 1e-3
"""Longest wait of the serving thread for the interpreter while the loader runs Python; it is 5 ms otherwise."""
_LESS_URGENT = 10
_STOP_S = 2.0
_LONGEST_REASON = 1000
MOST_PROGRAMS = 32
"""Programs whose compiled networks are kept."""

GAIN = 1.1
"""Least ratio of images a second at a size to those at half of it."""
_LEAST_S = 1e-3  # A shorter batch gains nothing: the work around it takes as long.

log = logging.getLogger("anychip.worker")


class WorkerModel:
    """A model on its device, loaded and warm.

    `report`: what the server hears. `buffers`: uint8 [rows, *input_shape] each, as many as batches may be in flight,
    the last used one at the end. `decoding`: the decoder if the device decodes its images.
    """

    def __init__(self, load: WorkerPlan, index: int, backend: Backend, decoder: ImageDecoder | None) -> None:
        """Load the model of this number. Raises ModelError, BackendError."""
        plan = load.plans[index]
        assert plan.model is not None
        self.model = model = plan.model
        items = probes(model) if plan.is_gated else None
        held_bytes = _held_bytes(backend, load.device.id, released=True)
        began_s = time.monotonic()
        found, latencies, grows = _made(load, plan, model, items, backend)
        self.executable, report = found
        # Twice the largest batch: the last part of a batch cut into parts may reach beyond its end.
        rows = 2 * self.executable.batch_sizes[-1]
        self.buffers = [self.executable.buffer(rows) for _ in range(self.executable.depth)]
        load_s = time.monotonic() - began_s
        _say(load.device.id, model, report, load_s)
        if load.confined and load.cache_dir and library_of(model.architecture) and report.engine != "eager":
            with contextlib.suppress(OSError):
                _kept_mark(load.cache_dir, model).touch()
        # In the host's memory free pages are not the model's, and the gate's reference is gone by now. A device keeps
        # the memory of the largest batch.
        taken = _held_bytes(backend, load.device.id, released=backend.facts.host_memory) - held_bytes
        self.decoding, decoded_by = agreed(decoder, model, self.executable, load.decode)
        self.report = Loaded(
            device=load.device.id,
            engine=report.engine,
            precision=report.precision,
            staged=report.staged,
            batch_sizes=list(latencies),
            refusals=dict(report.refusals),
            errors=dict(report.measures),
            operators=dict(report.operators),
            decoding=decoded_by,
            memory_bytes=max(0, taken),
            load_s=round(load_s, 3),
            model=index,
            latency_s=dict(latencies),
            depth=self.executable.depth,
            rejected=report.rejected,
            grows=grows,
        )


class LoadedDevice:
    """Everything on one device. `models`: by their numbers; those not to be loaded are missing."""

    def __init__(self, load: WorkerPlan, say: Callable[[Loaded], None] = lambda _: None) -> None:
        """Load and warm every model; `say` hears the report of each.

        Raises ModelError, BackendError, and the errors of plugins.
        """
        for plugin in load.plugins:
            importlib.import_module(plugin)
        self.load, self.device = load, load.device.id
        self.backend = open_backend(load.device)
        what_computes()
        if load.confined:  # Before any computation, as that starts threads.
            _confine(load)
        self.decoder = image_decoder(self.backend, self.device, load.decode)
        self.models: dict[int, WorkerModel] = {}
        for index, plan in enumerate(load.plans):
            if plan.model is not None and not plan.on_demand:
                self.models[index] = WorkerModel(load, index, self.backend, self.decoder)
                say(self.models[index].report)

    def close(self) -> None:
        """Close every executable."""
        for each in self.models.values():
            each.executable.close()


def _confine(load: WorkerPlan) -> None:
    """Confine the process before it reads a file that is a program, or that foreign libraries read: no other program or
    process, and no connection. It may read Python, the files of these networks and the images to calibrate on; it may
    write only compiled code, if anything.
    """
    there = what_there_is()
    if not (there.landlock and there.seccomp):
        lacks = "no Landlock" if there.seccomp else "no filter of system calls" if there.landlock else "neither of both"
        log.warning("files of others are served with fewer bounds: this kernel, or container, has %s", lacks)
    kept = private_folder(load.cache_dir) if load.cache_dir else None
    _import_libraries(load, kept)
    own = [path for model in load.models if model is not None and model.files for path in model.files.paths]
    images = [path.resolve() for plan in load.plans if plan.calibration for path in plan.calibration.files]
    if kept is not None and kept.parent.name == PROGRAMS:
        _forget_programs(kept)
    # Without a folder: torch asks for its name when it is imported, and keeps nothing there.
    tempfile.tempdir = str(kept or os.sep)
    writable = [Path(os.devnull), *([kept] if kept else [])]
    confine_program([*python_files(), *images], writable, own=own, memory_bytes=None)


def _forget_programs(kept: Path) -> None:
    """Remove the folders of programs that were used least recently, beyond MOST_PROGRAMS; never `kept`.

    What a program has put into its folder is not looked at: others start whatever it is.
    """
    with contextlib.suppress(OSError):
        os.utime(kept)
        folders = sorted(kept.parent.iterdir(), key=lambda each: each.lstat().st_mtime_ns, reverse=True)
        for each in folders[MOST_PROGRAMS:]:
            if each != kept:
                with contextlib.suppress(RecursionError):  # Folders within folders, a thousand deep.
                    shutil.rmtree(each, ignore_errors=True)


def _import_libraries(load: WorkerPlan, kept: Path | None) -> None:
    """Import the libraries that look around in the system when imported. Loading reports one that is missing.

    What builds a network is left out if the last load kept it compiled in `kept`: it takes seconds, and is hardly
    needed again. If it is needed, it is imported within the bounds; if that fails, the next load imports it here.
    """
    for plan in load.plans:
        if plan.model is None:
            continue
        if name := library_of(plan.model.architecture):
            mark = _kept_mark(kept, plan.model) if kept else None
            if mark is None or not mark.exists():
                with contextlib.suppress(ModelError):
                    builder().library(name)
            else:
                with contextlib.suppress(OSError):  # A cache that cannot be written serves, too.
                    mark.unlink()
        if plan.engine == "onnxruntime" or Path(plan.model.weights_file or "").suffix == ".onnx":
            with contextlib.suppress(ImportError):
                importlib.import_module("onnxruntime")


def _kept_mark(folder: Path, model: Model) -> Path:
    of = f"{weights_key(model)} {what_computes()}"
    return folder / f".kept-{hashlib.sha256(of.encode()).hexdigest()[:32]}"


def _made(
    load: WorkerPlan, plan: ModelPlan, model: Model, items: Pixels | None, backend: Backend
) -> tuple[LoadedNetwork, Mapping[int, float], bool]:
    """Make a network ready, with the gate's `items`. Return it, seconds of a batch by size, and whether a worker with
    time tries larger ones.
    """
    device = load.device
    kind = (type(backend).__qualname__, device.name, sorted(device.details.items()))
    machine = backend.facts.machine
    about = (*kind, driver_version(machine.driver), toolkit_version(machine), load.plugins)
    options = compile_options(model, items, plan.calibration, load.cache_dir, quick=load.quick, device=about)
    if model.files is not None:
        model.files.check()
    sizes = model.batch_sizes(plan.batch_sizes)

    def made(sizes: tuple[int, ...], engine: str = plan.engine, precision: str = plan.precision) -> LoadedNetwork:
        if model.batch_sizes(sizes) != sizes:
            raise EngineRefusedError(f"the network takes no batches of {sizes[-1]}")
        build = model.network if backend.facts.computes else model.network_of_shapes
        return backend.load(unbuilt(model, build), load.device.id, engine, precision, sizes, options=options)

    first = made(sizes)
    latency_s: Mapping[int, float] = _measured(first.executable)
    if not plan.grows or not pays(latency_s):
        return first, latency_s, False
    if load.quick:
        return first, latency_s, True
    return *grown(made, first, latency_s, lambda: backend.memory(device.id)), False


def unbuilt(model: Model, build: Callable[[], Network]) -> Network:
    """Return the model's network, not built yet if an engine may do without it."""
    if isinstance(model, TensorModel):
        known = {"file": model.weights_file, "inputs": model.inputs, "places": model.layout, "batched": model.batched}
        return Unbuilt(model.input_shape, build, model.form, **known)
    return Unbuilt(model.input_shape, build, model.form) if isinstance(model, PixelModel) else build()


def _held_bytes(backend: Backend, device: str, *, released: bool) -> int:
    """Return the device memory held now, or after caches are `released`; 0 if the device does not say."""
    try:
        if released:
            gc.collect()
            backend.release_cache(device)
        memory = backend.memory(device)
        return memory.allocated if backend.facts.host_memory else memory.used
    except DeviceLostError:
        raise
    except Exception as error:  # Vendors raise any error, and an unknown figure ends no start.
        log.warning("what a model takes of %s cannot be measured: %s", device, error)
        return 0


def pays(latency_s: Mapping[int, float]) -> bool:
    """Return True if the largest size brings enough over the one below. `latency_s`: seconds a batch, by size."""
    sizes = sorted(latency_s)
    if len(sizes) < 2 or latency_s[sizes[-1]] < _LEAST_S:
        return False
    below, largest = sizes[-2:]
    return largest / latency_s[largest] >= GAIN * below / latency_s[below]


def has_room(memory: Memory) -> bool:
    """Return True if twice the batch fits: this worker then holds up to twice as much as now, and a successor too."""
    return 3 * memory.reserved <= memory.total - memory.used


def grown(
    made: Callable[..., LoadedNetwork],
    first: LoadedNetwork,
    latency_s: Mapping[int, float],
    memory: Callable[[], Memory],
) -> tuple[LoadedNetwork, Mapping[int, float]]:
    """Try larger batches, each double the one before, while they pay; return what is to serve, and seconds of a batch
    by size: `first`, or the same network for more sizes.

    `made`: the network for batches of these sizes alone, on this engine and in this precision. A trial's BackendError
    ends the growth, not the worker; DeviceLostError is raised.
    """
    report, found = first.report, dict(latency_s)
    while pays(found) and (size := 2 * max(found)) <= LARGEST_BATCH:
        if not has_room(memory()):
            log.info("batches of %d are not tried: the memory is too small for two workers with them", size)
            break
        try:
            trial = made((size,), report.engine, report.precision)
            try:
                if trial.report.precision != report.precision:
                    break
                found[size] = _measured(trial.executable)[size]
            finally:
                trial.executable.close()
        except DeviceLostError:
            raise
        except BackendError as error:
            log.info("batches of %d are left out: %s", size, error)
            break
        log.info("batches of %d: %.1f images a second", size, size / found[size])
    if len(found) > len(latency_s) and not pays(found):
        del found[max(found)]
    if len(found) == len(latency_s):
        return first, latency_s
    first.executable.close()  # The network for more sizes needs its memory.
    try:
        larger = made(tuple(found))
    except DeviceLostError:
        raise
    except BackendError as error:
        log.warning("batches of %d do not fit beside the smaller ones, which serve alone: %s", max(found), error)
        larger = made(tuple(latency_s))
    return larger, _measured(larger.executable)


def _say(device: str, model: Model, report: LoadReport, load_s: float) -> None:
    errors = ", ".join(f"{name} {error:.2g}" for name, error in report.measures.items()) or "not measured"
    served = model.name, report.engine, report.precision, device, load_s, errors
    log.info("%s: %s %s on %s after %.1f s; errors against float32: %s", *served)
    for operator in report.operators:
        log.warning("%s: %s lacks %s, which runs on the CPU (docs/operators.md)", model.name, device, operator)


def _measured(executable: Executable) -> dict[int, float]:
    """Return the seconds a batch of each size takes; measure where the gate's runs were not enough to tell.

    A first run may compile. Then it takes longer than as many runs of a smaller batch would.
    """
    fastest_s = executable.fastest_s
    buffer = executable.buffer(executable.batch_sizes[-1])
    least_s = math.inf  # Least time of an image, in batches so far.
    for size in executable.batch_sizes:
        for _ in range(_WARM_UP_RUNS):
            if size in fastest_s and fastest_s[size] < 1.25 * size * least_s < math.inf:
                break
            executable.run(buffer[:size])
        least_s = min(least_s, fastest_s[size] / size)
    return dict(fastest_s)


class Loader:
    """Loader of one device's models on demand. The thread begins with the first model."""

    def __init__(self, loaded: LoadedDevice, link: ServerLink) -> None:
        self._loaded, self._link = loaded, link
        self._work: queue.SimpleQueue[tuple[int, WorkerModel | None] | None] = queue.SimpleQueue()
        self._more: deque[int] = deque()
        self._lost: list[DeviceLostError] = []
        self._thread: threading.Thread | None = None

    def load(self, index: int) -> None:
        """Load the model of this number; Loaded is sent when it serves, or NotLoaded with the reason."""
        self._ask(index, None)

    def unload(self, index: int) -> None:
        """Stop serving the model of this number; ModelUnloaded is sent when its memory is free."""
        self._ask(index, self._loaded.models.pop(index))

    def more_bytes(self) -> int:
        """Return the memory that models have taken since the last call. Raises a load's DeviceLostError."""
        if self._lost:
            raise self._lost[0]
        return sum(self._more.popleft() for _ in range(len(self._more)))

    def stop(self) -> None:
        """Begin nothing more, and wait a moment for the work that has begun."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_STOP_S)

    def _ask(self, index: int, goes: WorkerModel | None) -> None:
        if self._thread is None:
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
            self._thread.start()
        self._work.put((index, goes))

    def _run(self) -> None:
        # A CPU's engines start threads here that compute for all models, and would keep this priority.
        if not self._loaded.backend.facts.host_memory:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LESS_URGENT)
        with self._loaded.backend.beside(self._loaded.device):
            self._work_off()

    def _work_off(self) -> None:
        while (work := self._work.get()) is not None:
            index, goes = work
            del work
            try:
                if goes is None:
                    self._link.send(self._loaded_model(index))
                else:
                    goes.executable.close()
                    self._more.append(-goes.report.memory_bytes)
                    goes = None
                    gc.collect()
                    self._loaded.backend.release_cache(self._loaded.device)
                    self._link.send(ModelUnloaded(index))
            except DeviceLostError as error:
                self._lost.append(error)
                return
            except OSError:  # The server is gone: the other thread notices it, too.
                return

    def _loaded_model(self, index: int) -> Loaded | NotLoaded:
        loaded = self._loaded
        model = loaded.load.models[index]
        assert model is not None
        try:
            # A model on demand is loaded quick: no request may wait for minutes.
            made = WorkerModel(replace(loaded.load, quick=True), index, loaded.backend, loaded.decoder)
        except DeviceLostError:
            raise
        except Exception as error:  # Any error of a driver or a file: the other models serve on.
            log.warning("%s cannot be loaded: %s", model.name, error, exc_info=True)
            reason = f"{error}"[:_LONGEST_REASON] or type(error).__name__
        else:
            self._more.append(made.report.memory_bytes)
            loaded.models[index] = made
            return made.report
        # Not inside `except`: the traceback still holds what the failed load had allocated.
        gc.collect()
        loaded.backend.release_cache(loaded.device)
        return NotLoaded(index, reason)
