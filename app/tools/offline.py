"""Predictions for many images in this process: `anychip predict` without `--url`.

    sources ─► decoder threads ─► a few batches of pixels ─► one device thread ─► postprocessing here ─► outcomes

Owns: the way from files to predictions without a service. While the device computes a batch, the decoder threads fill
the next ones, and this thread finishes the one before. Devices that take two batches at a time are given the next one
before the answers to the last are looked at. Memory stays flat: a fixed number of batches exists.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.config import Settings, split
from app.decoders.decoder import decode_into
from app.images.header import ImageError, check_pixels, read_header
from app.precision.gate import compile_options
from app.precision.probes import Calibration, probes
from app.tools.image_sources import ImageSource
from app.tools.outcomes import FileOutcome
from backends import Executable, Started, Unbuilt, choose, host, register_operator_libraries, simulated
from models import Options, PixelModel, Placement

_BATCHES = 4
"""Batches that exist at a time: one on the device, one being finished, two being decoded."""

Reduced = list[tuple[npt.NDArray[Any], ...]]


@dataclass(slots=True)
class _Decoded:
    """An image on its way: its file, and where it lies in the network's input, or why it cannot be read."""

    source: ImageSource
    encoded: bytes | None = None
    placement: Placement | None = None
    error: str = ""


@dataclass(slots=True)
class _OfflineBatch:
    """Pixels, uint8 [batch size, *input shape], the images that are decoded into them, and what came of them."""

    pixels: torch.Tensor
    parts: list[Future[list[_Decoded]]] = field(default_factory=list)
    reduced: Future[Reduced] = field(default_factory=Future)

    def images(self) -> list[_Decoded]:
        """In the order of the rows, once every one is decoded."""
        return [image for part in self.parts for image in part.result()]


class LocalPredictor:
    """A model on the first device that fits the settings. A context manager: its threads end with it."""

    def __init__(self, model: PixelModel, settings: Settings, options: Options, batch_size: int) -> None:
        """Loads the model for batches of `batch_size`. Raises ModelError, BackendError, CalibrationError."""
        if settings.simulate:
            simulated.configure(settings.simulate, settings.cache_dir.expanduser())
        register_operator_libraries(split(settings.operator_libraries))
        self._model = model
        self._settings = settings
        self._options = options
        self._batch_size = batch_size
        self.threads = settings.decoders or host.core_count()
        # Before the device's thread, whose load says how many threads PyTorch may use there.
        self.decoders = _decoder_threads(self.threads)
        # Vendors keep the current device and graphs by thread: whatever loads the network also runs it.
        self._device_thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._started: tuple[_OfflineBatch, Started] | None = None
        try:
            self.executable = self._device_thread.submit(self._load).result()
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def weights(self) -> str:
        """Where its weights come from."""
        return self._model.weights

    def close(self) -> None:
        """End the threads; decoding that has not begun is dropped."""
        self.decoders.shutdown(cancel_futures=True)
        self._device_thread.shutdown(cancel_futures=True)

    def outcomes(self, sources: Iterator[ImageSource]) -> Iterator[FileOutcome]:
        """One outcome a source, in the order of the sources. Raises BackendError when the device fails."""
        free = deque(self._device_thread.submit(self._buffers).result())
        under_way: deque[_OfflineBatch] = deque()
        ended: list[tuple[_Decoded, tuple[npt.NDArray[Any], ...]]] = []
        while True:
            # The decoders get work before this thread finishes what has ended.
            while free:
                if not (taken := list(islice(sources, self._batch_size))):
                    self._device_thread.submit(self._settle)  # No other batch will.
                    break
                batch = free.popleft()
                batch.parts, batch.reduced = self._decode_all(taken, batch.pixels), Future()
                # The device thread waits for the decoders, so that this one need not pass the batch on.
                self._device_thread.submit(self._run, batch)
                under_way.append(batch)
            for image, outputs in ended:
                yield self._finish(image, outputs)
            if not under_way:
                return
            batch = under_way.popleft()
            ended = list(zip(batch.images(), batch.reduced.result(), strict=True))
            free.append(batch)

    def _load(self) -> Executable:
        settings, model = self._settings, self._model
        choice = choose(settings.device)
        options = compile_options(
            model,
            probes(model) if choice.backend.facts.computes else None,
            Calibration(model, settings.calibrate) if settings.precision == "int8" else None,
            settings.cache_dir.expanduser(),
        )
        executable, _ = choice.backend.load(
            Unbuilt(model.input_shape, model.network),
            choice.devices[0],
            settings.engine,
            settings.precision,
            (self._batch_size,),
            options=options,
        )
        return executable

    def _decode_all(self, sources: list[ImageSource], pixels: torch.Tensor) -> list[Future[list[_Decoded]]]:
        """Sources into the rows of a batch, in order.

        A task a thread and not an image: handing over a task takes time that counts beside a small image.
        """
        size = -(-len(sources) // self.threads)

        def decode_some(first: int) -> list[_Decoded]:
            some = enumerate(sources[first : first + size], first)
            return [self.decode(source, pixels[row]) for row, source in some]

        return [self.decoders.submit(decode_some, first) for first in range(0, len(sources), size)]

    def decode(self, source: ImageSource, target: torch.Tensor) -> _Decoded:
        """In a decoder thread: a file into its row of a batch."""
        image = _Decoded(source)
        try:
            with open(source.path, "rb") as file:
                image.encoded = file.read()
            header = read_header(image.encoded)
            check_pixels(header, self._settings.max_image_pixels)
            image.placement = decode_into(self._model, image.encoded, header, target)
        except ImageError as error:
            image.error = str(error)
        except OSError as error:
            image.error = error.strerror or str(error)
        return image

    def _buffers(self) -> list[_OfflineBatch]:
        """In the device thread: memory that the device copies from fastest."""
        return [_OfflineBatch(torch.from_numpy(self.executable.buffer(self._batch_size))) for _ in range(_BATCHES)]

    def _run(self, batch: _OfflineBatch) -> None:
        """In the device thread: a batch onto the device, and then what came of the one before."""
        started: Started | None = None
        try:
            images = batch.images()  # Every one is waited for before the device reads.
            if all(image.placement is None for image in images):
                batch.reduced.set_result([() for _ in images])
            elif self.executable.depth > 1:
                started = self.executable.start(batch.pixels.numpy())
            else:
                batch.reduced.set_result(self._reduce(self.executable.run(batch.pixels.numpy()), len(images)))
        except Exception as error:  # Whoever waits for the batch raises it.
            batch.reduced.set_exception(error)
        self._settle()
        self._started = None if started is None else (batch, started)

    def _settle(self) -> None:
        """In the device thread: wait for the batch that is on the device, if one is."""
        if self._started is None:
            return
        (batch, started), self._started = self._started, None
        try:
            batch.reduced.set_result(self._reduce(started.outputs(), len(batch.images())))
        except Exception as error:
            batch.reduced.set_exception(error)

    def _reduce(self, outputs: Sequence[npt.NDArray[Any]], count: int) -> Reduced:
        """The small arrays of each image; those of a file that cannot be read mean nothing."""
        return [self._model.reduce(outputs, row, self._options) for row in range(count)]

    def _finish(self, image: _Decoded, outputs: Sequence[npt.NDArray[Any]]) -> FileOutcome:
        if image.placement is None:
            return FileOutcome(image.source, None, image.error, image.encoded)
        if not all(np.isfinite(array).all() for array in outputs if array.dtype.kind == "f"):
            return FileOutcome(image.source, None, "the model answered with NaN or infinity", image.encoded)
        prediction = self._model.postprocess(outputs, image.placement, self._options)
        return FileOutcome(image.source, prediction, "", image.encoded)


def _decoder_threads(count: int) -> ThreadPoolExecutor:
    """Threads that each compute alone: an image is too small to be shared out among threads that wait for each other.

    PyTorch keeps the number of threads of an operation by calling thread, from the thread's first question on.
    """
    started = threading.Barrier(count)

    def begin() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        started.wait()

    decoders = ThreadPoolExecutor(count, thread_name_prefix="decode", initializer=begin)
    # A pool starts a thread when it gets work and none is idle: all begin now, before anybody wants another number.
    list(decoders.map(lambda _: None, range(count)))
    return decoders
