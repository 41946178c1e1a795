"""The worker's loop: one thread owns one device and answers the server's messages in order.

Run ─► slots of a batch ─► executable ─► Model.reduce ─► results ─► Done
                               └─ out of memory ─► release, gather, halve, again
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from app.processes.arena import Arena
from app.worker.load import LoadedDevice, Loader
from app.worker.memory import MemoryWatch
from app.worker.messages import Done, Ended, Failed, LoadModel, Release, Run, ServerLink, Stop, UnloadModel
from app.worker.results import Arrays, ResultError, write_results
from backends import BackendError, DeviceLostError, Executable, OutOfDeviceMemoryError, Started
from backends.contract.backend import Array, Pixels
from models import Options, TensorOptions

STATS_INTERVAL_S = 1.0
_MAX_REASON = 2000

log = logging.getLogger("anychip.worker")

Outputs = tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A batch that was given to the device."""

    run: Run
    started: Started
    started_s: float
    expected_s: float
    prepare_s: float
    undecoded: tuple[int, ...]


_Answer = tuple[Done | Failed, tuple[int, ...]]
"""The message that answers a batch, and the descriptors that go with it."""


class Worker:
    """Executables on one device, and the loop that feeds them."""

    def __init__(self, loaded: LoadedDevice, memory: MemoryWatch, arena: Arena, link: ServerLink) -> None:
        self._device = loaded.device
        self._models = loaded.models
        self._memory = memory
        self._arena = arena
        self._link = link
        self._done_s = 0.0
        self._loader = Loader(loaded, link)

    def serve(self) -> None:
        """Answer messages until Stop or until the device is lost. Raises EOFError, ConnectionError without a server."""
        try:
            self._serve()
        except DeviceLostError as error:
            log.exception("the device is lost")
            self._link.send(Ended(f"{error}", "leaked" if self._memory.leaks else "lost"))
        finally:
            self._loader.stop()

    def _serve(self) -> None:
        reported_s = -STATS_INTERVAL_S
        under_way: _UnderWay | None = None
        while True:
            now_s = time.monotonic()
            if now_s - reported_s >= STATS_INTERVAL_S:
                reported_s = now_s
                self._link.send(self._memory.stats())
            # While a batch computes, the next one may come: it is copied meanwhile, and follows without a pause.
            message = self._link.receive(STATS_INTERVAL_S if under_way is None else under_way.expected_s)
            following = self._start(message) if isinstance(message, Run) else None
            if under_way is not None:
                self._answer(self._finish(under_way))
            under_way = following
            self._memory.guard.held(self._loader.more_bytes())
            match message:
                case Run() if following is None:
                    self._answer(self._run(message))
                case Release():
                    self._link.send(self._memory.release())
                case LoadModel():
                    self._loader.load(message.model)
                case UnloadModel():
                    self._loader.unload(message.model)
                case Stop():
                    return

    def _answer(self, answer: _Answer) -> None:
        message, descriptors = answer
        self._link.send(message, descriptors)
        self._memory.after_batch(self._link.send)

    def _done(
        self,
        run: Run,
        results: list[Arrays],
        infer_s: float,
        undecoded: tuple[int, ...],
        *,
        fitted: int = 0,
        prepare_s: float = 0.0,
    ) -> _Answer:
        for row in undecoded:
            results[row] = None
        try:
            layouts, small, large_bytes, descriptor = write_results(results)
        except (ResultError, OSError, ValueError) as error:
            return _failed(run, error)
        done = Done(run.batch_id, layouts, infer_s, fitted, large_bytes, prepare_s, undecoded, small)
        return done, (descriptor,) if large_bytes else ()

    def _start(self, run: Run) -> _UnderWay | None:
        """Give the batch to the device without waiting for its end; return None if that cannot be, or has failed.

        Raises DeviceLostError.
        """
        loaded = self._models[run.model]
        if loaded.executable.depth == 1:
            return None
        received_s = time.perf_counter()
        try:
            if loaded.executable.takes_rows:
                rows, undecoded = self._rows(run)
                started_s = time.perf_counter()
                started = loaded.executable.start_rows(rows, run.batch_size)
            else:
                pixels, undecoded = self._gathered(run)
                started_s = time.perf_counter()
                started = loaded.executable.start(pixels[: run.batch_size])
        except DeviceLostError:
            raise
        except BackendError as error:
            log.info("batch %d is tried again by itself: %s", run.batch_id, error)
            return None
        # A little less, so that waiting for a message never makes an answer late.
        expected_s, prepare_s = 0.9 * loaded.report.latency_s[run.batch_size], time.perf_counter() - received_s
        return _UnderWay(run, started, started_s, expected_s, prepare_s, undecoded)

    def _finish(self, under_way: _UnderWay) -> _Answer:
        run = under_way.run
        try:
            outputs = under_way.started.outputs()
            now_s = time.perf_counter()
            # The device was busy with the batch before until that was done.
            infer_s = now_s - max(under_way.started_s, self._done_s)
            self._done_s = now_s
            results = self._reduced(run, outputs, run.asked(), run.batch_size)
            return self._done(run, results, infer_s, under_way.undecoded, prepare_s=under_way.prepare_s)
        except DeviceLostError:
            raise
        except OutOfDeviceMemoryError:
            return self._run(run)
        except Exception as error:
            return _failed(run, error)

    def _rows(self, run: Run) -> tuple[list[Pixels | Tensor], tuple[int, ...]]:
        """Return the items of a batch in their slots or on the device, and the positions of files that it cannot
        decode: its results for those bytes are not sent. Raises DeviceLostError.
        """
        loaded = self._models[run.model]
        slots = [self._arena.slot(run.model, slot) for slot in run.slots]
        rows: list[Pixels | Tensor] = [slot.reshape(loaded.model.input_shape) for slot in slots]
        undecoded: tuple[int, ...] = run.files  # If they were meant for another worker.
        if run.files and loaded.decoding is not None:
            found, undecoded = loaded.decoding.on_device([(row, slots[row]) for row in run.files])
            for row, item in found.items():
                rows[row] = item
        return rows, undecoded

    def _gathered(self, run: Run) -> tuple[Pixels, tuple[int, ...]]:
        """Gather the items of a batch, padded with zeros, in a buffer that no batch in flight uses.

        Returns also the positions of files that the device cannot decode. Raises DeviceLostError.
        """
        rows, undecoded = self._rows(run)
        buffers = self._models[run.model].buffers
        buffer = buffers.pop(0)
        buffers.append(buffer)
        for row, item in enumerate(rows):
            buffer[row] = item.cpu().numpy() if isinstance(item, Tensor) else item
        buffer[list(undecoded)] = 0
        buffer[len(rows) : run.batch_size] = 0
        return buffer, undecoded

    def _run(self, run: Run) -> _Answer:
        try:
            pixels, undecoded = self._gathered(run)
            started_s = time.perf_counter()
            results, fitted = self._results(run, pixels)
            self._done_s = time.perf_counter()
            fitted = 0 if fitted == run.batch_size else fitted
            return self._done(run, results, self._done_s - started_s, undecoded, fitted=fitted)
        except DeviceLostError:
            raise
        except OutOfDeviceMemoryError as error:
            if self._memory.exhausted():  # Only the worker's end helps; the next one gets the rest.
                raise DeviceLostError(f"{error}: it leaks, and its replacement was not ready in time") from error
            return _failed(run, error)
        except Exception as error:  # The batch fails, the worker lives on; the server decides what follows.
            return _failed(run, error)

    def _results(self, run: Run, pixels: Pixels) -> tuple[list[Arrays], int]:
        """Return every item's result, and the largest size that the device's memory held.

        If memory runs out, the cache is released and half as many are tried. Raises OutOfDeviceMemoryError if not even
        the smallest batch fits, ValueError, BackendError.
        """
        executable = self._models[run.model].executable
        results: list[Arrays] = []
        asked, size = run.asked(), run.batch_size
        while len(results) < len(run.slots):
            first = len(results)
            outputs = self._outputs(executable, pixels[first : first + size])
            if outputs is None:
                smaller = [each for each in executable.batch_sizes if each < size]
                if not smaller:
                    raise OutOfDeviceMemoryError(f"{self._device} has no memory for a batch of {size}")
                size = max((each for each in smaller if each <= size // 2), default=smaller[0])
                continue
            results += self._reduced(run, outputs, asked[first : first + size], size)
        return results, size

    def _reduced(self, run: Run, outputs: Outputs, asked: Sequence[Options | TensorOptions], size: int) -> list[Arrays]:
        model = self._models[run.model].model
        if any(len(output) != size for output in outputs):
            shapes = [output.shape for output in outputs]
            raise ValueError(f"{model.name} answered a batch of {size} with {shapes}")
        # Before any reduction: a comparison with a threshold would drop NaN silently.
        if model.may_be_infinite or _finite([output[: len(asked)] for output in outputs]):
            return [*model.reduce_all(outputs, asked)]
        return [
            model.reduce(outputs, row, options) if _finite([output[row] for output in outputs]) else None
            for row, options in enumerate(asked)
        ]

    def _outputs(self, executable: Executable, pixels: Pixels) -> Outputs | None:
        """Run a batch; return None if the device has no memory for it, even with its cache released."""
        while True:
            try:
                return executable.run(pixels)
            except OutOfDeviceMemoryError as error:
                log.warning("%s; its cache is released", error)
            # Not inside `except`: the traceback still holds what the failed call had allocated.
            if not self._memory.make_room():
                return None


def _failed(run: Run, error: Exception) -> _Answer:
    log.error("batch %d failed", run.batch_id, exc_info=error)
    return Failed(run.batch_id, f"{type(error).__name__}: {error}"[:_MAX_REASON]), ()


def _finite(outputs: Sequence[Array]) -> bool:
    return all(np.isfinite(output).all() for output in outputs if output.dtype.kind == "f")
