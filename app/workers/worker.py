"""The worker process: one thread owns one device, another says that the process lives.

    Run ─► gather slots into a batch ─► executable ─► Model.reduce ─► Done
                                            └─ out of memory ─► release, halve, again

Owns: the device, the executables, the batch buffers. Must not know HTTP, queues or deadlines. `run` takes a connection
and an arena, so that tests run it in a thread; `main` is the process around it. torch, models and backends are
imported only after that has set the environment: vendor libraries read theirs when they load.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from app.workers.arena import Arena
from app.workers.guard import CACHE, COLLECT, HAND_OVER, Guard, Level, Step
from app.workers.messages import (
    Beat,
    Done,
    Ended,
    Failed,
    HandOver,
    Load,
    Loaded,
    Ready,
    Release,
    Released,
    Run,
    Stats,
    Stop,
)

if TYPE_CHECKING:
    from backends import Backend, Executable, Started
    from models import Model

STATS_INTERVAL_S = 1.0
BEAT_INTERVAL_S = 0.5
_WARM_UP_RUNS = 2

log = logging.getLogger("anychip.worker")

Result = tuple[npt.NDArray[Any], ...] | None


def run(connection: Connection[Any, Any], arena: Arena) -> None:
    """Load what the first message asks for, then serve until Stop or until the other end is gone."""
    with contextlib.closing(connection):
        try:
            load = connection.recv()
            try:
                worker = Worker(load, arena)
            except Exception as error:  # Whatever a driver throws at start, the server must hear it in one sentence.
                log.debug("the worker cannot start", exc_info=True)
                connection.send(Ended(f"{error}" or type(error).__name__))
                return
            gc.collect()
            gc.freeze()  # What is loaded stays; collections between batches are short.
            with contextlib.closing(worker):
                connection.send(worker.ready)
                with _Pipe(connection) as pipe:
                    worker.serve(pipe)
        except (EOFError, ConnectionError):
            log.info("the server is gone; the worker ends")


class _Pipe:
    """The worker's end of the pipe; a thread of its own says every now and then that the process lives."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> _Pipe:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._heart.join()

    def send(self, message: Any) -> None:
        """Raises ConnectionError when the server is gone."""
        with self._lock:
            self._connection.send(message)

    def receive(self, timeout_s: float) -> Any:
        """The next message, None when none came in time. Raises EOFError, ConnectionError."""
        return self._connection.recv() if self._connection.poll(timeout_s) else None

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # The server is gone: the other thread hears it too.
            while not self._stop.wait(BEAT_INTERVAL_S):
                self.send(Beat())


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A batch that was given to the device."""

    run: Run
    started: Started
    started_s: float
    expected_s: float


class Worker:
    """Executables on one device, and the loop that feeds them."""

    def __init__(self, load: Load, arena: Arena) -> None:
        """Load and warm every model. Raises ModelError, BackendError."""
        from app.precision.gate import compile_options
        from backends import Unbuilt, choose, register_operator_libraries
        from models import PixelModel

        for plugin in load.plugins:
            importlib.import_module(plugin)
        register_operator_libraries(load.operator_libraries)
        choice = choose(load.device)
        self._arena = arena
        self._backend: Backend = choice.backend
        self._device = choice.devices[0]
        # By their numbers, of which those not to be loaded have left gaps.
        self._models: dict[int, Model] = {index: model for index, model in enumerate(load.models) if model is not None}
        self._executables: dict[int, Executable] = {}
        self._buffers: dict[int, list[npt.NDArray[np.uint8]]] = {}  # Of each model, as many as may be under way.
        self._latency_s: dict[int, Mapping[int, float]] = {}
        self._done_s = 0.0
        loaded: dict[int, Loaded] = {}
        staged = False
        for index, model in self._models.items():
            sizes = model.batch_sizes(load.batch_sizes)
            network = Unbuilt(model.input_shape, model.network) if isinstance(model, PixelModel) else model.network()
            executable, report = self._backend.load(
                network, self._device, load.engine, load.precision, sizes,
                options=compile_options(
                    model,
                    load.probes[index] if load.probes else None,
                    load.calibrations[index] if load.calibrations else None,
                    load.cache_dir,
                    quick=load.quick,
                ),
            )  # fmt: skip
            staged = staged or report.staged
            self._executables[index] = executable
            # Twice the largest batch: of one that is cut into parts, the last may reach beyond its end.
            rows = 2 * executable.batch_sizes[-1]
            self._buffers[index] = [executable.buffer(rows) for _ in range(executable.depth)]
            latency_s = self._latencies(executable, self._buffers[index][0])
            self._latency_s[index] = latency_s
            loaded[index] = Loaded(report, latency_s)
            errors = ", ".join(f"{name} {error:.2g}" for name, error in report.measures.items())
            served = model.name, report.engine, report.precision, self._device, errors or "not measured"
            log.info("%s: %s %s on %s; errors against float32: %s", *served)
            for operator, how in report.operators.items():
                if how != "replaced":
                    log.warning(
                        "%s: %s lacks %s, which runs on the CPU (docs/operators.md)", model.name, self._device, operator
                    )
        device = next(device for device in self._backend.devices() if device.id == self._device)
        shared = self._backend.facts.host_memory
        self._leaks = False  # The server knows, and starts another worker.
        self._forced_bytes: list[int] = []  # Returned by releases that a batch of the last run could not do without.
        self._guard = Guard(load.guard, self._level(), time.monotonic(), shared=shared)
        of_each = tuple(loaded.get(index) for index in range(len(load.models)))
        self.ready = Ready(self._device, device.name, of_each, staged)

    def close(self) -> None:
        """Give the device back."""
        for executable in self._executables.values():
            executable.close()

    def serve(self, pipe: _Pipe) -> None:
        """Answer messages until Stop or until the device is lost. Raises EOFError, ConnectionError: no server."""
        from backends import DeviceLostError

        reported_s = -STATS_INTERVAL_S
        under_way: _UnderWay | None = None
        while True:
            now_s = time.monotonic()
            if now_s - reported_s >= STATS_INTERVAL_S:
                reported_s = now_s
                pipe.send(self._stats())
            # While a batch computes, the next one may come: it is copied meanwhile, and follows without a pause.
            message = pipe.receive(STATS_INTERVAL_S if under_way is None else under_way.expected_s)
            try:
                following = self._start(message) if isinstance(message, Run) else None
                if under_way is not None:
                    self._answer(pipe, self._finish(under_way))
                under_way = following
                if isinstance(message, Run) and following is None:
                    self._answer(pipe, self._run(message))
                elif isinstance(message, Release):
                    pipe.send(self._release_now(message))
                elif isinstance(message, Stop):
                    return
            except DeviceLostError as error:
                log.exception("the device is lost")
                pipe.send(Ended(f"{error}", "leaked" if self._leaks else "lost"))
                return

    def _answer(self, pipe: _Pipe, answer: Done | Failed) -> None:
        pipe.send(answer)
        self._give_back(pipe)

    def _start(self, run: Run) -> _UnderWay | None:
        """Give the batch to the device and come back before it is done; None where that cannot be, or has failed.

        Raises DeviceLostError.
        """
        from backends import BackendError, DeviceLostError

        executable = self._executables[run.model]
        if executable.depth == 1:
            return None
        pixels = self._gathered(run)
        started_s = time.perf_counter()
        try:
            started = executable.start(pixels[: run.batch_size])
        except DeviceLostError:
            raise
        except BackendError as error:
            log.info("batch %d is tried again by itself: %s", run.batch_id, error)
            return None
        # A little less, so that waiting for a message never makes an answer late.
        return _UnderWay(run, started, started_s, 0.9 * self._latency_s[run.model][run.batch_size])

    def _finish(self, under_way: _UnderWay) -> Done | Failed:
        """Raises DeviceLostError."""
        from backends import DeviceLostError, OutOfDeviceMemoryError

        run = under_way.run
        try:
            outputs = under_way.started.outputs()
            now_s = time.perf_counter()
            # The device was busy with the batch before until that was done.
            infer_s = now_s - max(under_way.started_s, self._done_s)
            self._done_s = now_s
            return Done(run.batch_id, tuple(self._reduced(run, outputs, 0, run.batch_size)), infer_s)
        except DeviceLostError:
            raise
        except OutOfDeviceMemoryError:
            return self._run(run)
        except Exception as error:
            return self._failed(run, error)

    def _gathered(self, run: Run) -> npt.NDArray[np.uint8]:
        """The items of a batch, one after the other, padded with zeros: a buffer that no batch under way uses."""
        model, buffers = self._models[run.model], self._buffers[run.model]
        buffers.append(buffers.pop(0))
        buffer = buffers[-1]
        for row, slot in enumerate(run.slots):
            buffer[row] = self._arena.slot(run.model, slot).reshape(model.input_shape)
        buffer[len(run.slots) : run.batch_size] = 0
        return buffer

    def _run(self, run: Run) -> Done | Failed:
        """Run a batch with nothing else under way. Raises DeviceLostError."""
        from backends import DeviceLostError, OutOfDeviceMemoryError

        try:
            pixels = self._gathered(run)
            started_s = time.perf_counter()
            results, fitted = self._results(run, pixels)
            self._done_s = time.perf_counter()
            return Done(run.batch_id, results, self._done_s - started_s, 0 if fitted == run.batch_size else fitted)
        except DeviceLostError:
            raise
        except OutOfDeviceMemoryError as error:
            if self._leaks:  # Nothing helps but the worker's end; what it has not done waits for the next one.
                raise DeviceLostError(f"{error}: it leaks, and its replacement was not ready in time") from error
            return self._failed(run, error)
        except Exception as error:  # The batch fails, the worker lives on; the server decides what follows.
            return self._failed(run, error)

    @staticmethod
    def _failed(run: Run, error: Exception) -> Failed:
        log.error("batch %d failed", run.batch_id, exc_info=error)
        return Failed(run.batch_id, f"{type(error).__name__}: {error}")

    def _results(self, run: Run, pixels: npt.NDArray[np.uint8]) -> tuple[tuple[Result, ...], int]:
        """Every image's result, and how many at once the device's memory held.

        Out of memory, the cache is released and half as many are tried. Raises OutOfDeviceMemoryError when not even the
        smallest batch fits, ValueError, BackendError.
        """
        from backends import OutOfDeviceMemoryError

        executable = self._executables[run.model]
        results: list[Result] = []
        size = run.batch_size
        while len(results) < len(run.slots):
            first = len(results)
            outputs = self._outputs(executable, pixels[first : first + size])
            if outputs is None:
                smaller = [rung for rung in executable.batch_sizes if rung < size]
                if not smaller:
                    raise OutOfDeviceMemoryError(f"{self._device} has no memory for a batch of {size}")
                size = max((rung for rung in smaller if rung <= size // 2), default=smaller[0])
                continue
            results += self._reduced(run, outputs, first, size)
        return tuple(results), size

    def _reduced(self, run: Run, outputs: tuple[npt.NDArray[Any], ...], first: int, size: int) -> list[Result]:
        """What is sent of the outputs of images `first` to `first + size`. Raises ValueError."""
        model = self._models[run.model]
        if any(len(output) != size for output in outputs):
            shapes = [output.shape for output in outputs]
            raise ValueError(f"{model.name} answered a batch of {size} with {shapes}")
        return [
            model.reduce(outputs, row, options) if model.may_be_infinite or _finite(outputs, row) else None
            for row, options in enumerate(run.options[first : first + size])
        ]

    def _outputs(self, executable: Executable, pixels: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[Any], ...] | None:
        """None when the device has no memory for it, even with its cache released."""
        from backends import OutOfDeviceMemoryError

        while True:
            try:
                return executable.run(pixels)
            except OutOfDeviceMemoryError as error:
                log.warning("%s; its cache is released", error)
            # Not inside `except`: the traceback still holds what the failed call had allocated.
            returned = self._backend.release_cache(self._device)
            self._forced_bytes.append(returned)
            if not returned or len(self._forced_bytes) > 1:
                return None

    @staticmethod
    def _latencies(executable: Executable, buffer: npt.NDArray[np.uint8]) -> dict[int, float]:
        """Seconds a batch of each size takes, where the gate's runs were not enough to tell.

        A first run may compile. Then it takes longer than as many runs of a smaller batch would.
        """
        fastest_s = executable.fastest_s
        least_s = math.inf  # An image, in batches so far.
        for size in executable.batch_sizes:
            for _ in range(_WARM_UP_RUNS):
                if size in fastest_s and fastest_s[size] < 1.25 * size * least_s < math.inf:
                    break
                executable.run(buffer[:size])
            least_s = min(least_s, fastest_s[size] / size)
        return dict(fastest_s)

    def _give_back(self, pipe: _Pipe) -> None:
        """After a batch, its answer is on its way: look at the memory and do what the guard says."""
        self._guard.after_batch()
        if self._forced_bytes:
            pipe.send(Released("out_of_memory", {CACHE: sum(self._forced_bytes)}))
            self._forced_bytes.clear()
        started_s = time.monotonic()
        if not self._guard.due(started_s):
            return
        level = self._level()
        now_s = time.monotonic()
        step = self._guard.look(level, now_s, now_s - started_s)
        if step is None:
            return
        trigger, returned = step.trigger, {}
        while step is not None and step.rung != HAND_OVER:
            started_s = time.monotonic()
            returned[step.rung], level = self._climb(step, level)
            now_s = time.monotonic()
            step = self._guard.released(step, level, now_s, now_s - started_s)
        if returned:
            pipe.send(Released(trigger, returned))
        if step is not None:
            self._leaks = True
            pipe.send(HandOver(trigger))

    def _release_now(self, release: Release) -> Released:
        returned: dict[int, int] = {}
        level = self._level()
        for rung in (COLLECT, CACHE):
            returned[rung], level = self._climb(Step(rung, "batches"), level)
        return Released("request", returned, release.request)

    def _climb(self, step: Step, before: Level) -> tuple[int, Level]:
        """Climb a rung; the bytes it returned, and what is left. Raises DeviceLostError."""
        from backends import BackendError, DeviceLostError, run_release_hooks

        counted = 0
        try:
            if step.rung == COLLECT:
                gc.collect()
            else:
                counted = self._backend.release_cache(self._device)
                counted += run_release_hooks(self._backend.name, self._device)
        except DeviceLostError:
            raise
        except BackendError:
            log.exception("rung %d of the memory guard failed", step.rung)
        level = self._level()
        seen = max(before.used - level.used, before.resident - level.resident, 0) if step.rung == COLLECT else 0
        log.debug("rung %d for %s returned %d bytes", step.rung, step.trigger, counted or seen)
        return counted or seen, level

    def _level(self) -> Level:
        import psutil

        memory = self._backend.memory(self._device)
        resident = psutil.Process().memory_info().rss
        return Level(memory.allocated, memory.reserved, memory.used, memory.total, resident)

    def _stats(self) -> Stats:
        from backends import fallback_counts

        level = self._level()
        telemetry = self._backend.telemetry(self._device)
        return Stats(
            *(level.allocated, level.reserved, level.used, level.total, level.resident),
            telemetry.utilization_ratio,
            telemetry.power_watts,
            telemetry.energy_joules,
            telemetry.temperature_celsius,
            fallback_counts(),
        )


def _finite(outputs: Sequence[npt.NDArray[Any]], row: int) -> bool:
    # Before anything is reduced: a comparison with a threshold would drop NaN without a word.
    return all(np.isfinite(output[row]).all() for output in outputs if output.dtype.kind == "f")
