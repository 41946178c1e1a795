"""Predictions for many images in this process: `anychip predict` without `--url`.

    sources ─► decoders ─► a few batches of pixels ─► one device thread ─► postprocessing here ─► outcomes

Owns: the way from files to predictions without a service. While the device computes a batch, the decoders fill the next
ones, and this thread finishes the one before. Devices that take two batches at a time are given the next one
before the answers to the last are looked at. Memory stays flat: a fixed number of batches exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from app.config import Settings, split
from app.precision.gate import compile_options
from app.precision.probes import Calibration, probes
from app.tools.image_sources import ImageSource
from app.tools.offline_decoding import Decode, DecodedFile, DecodingProcesses, DecodingThreads
from app.tools.outcomes import FileOutcome
from backends import Executable, Started, Unbuilt, choose, host, register_operator_libraries, simulated
from models import Options, PixelModel

_BATCHES = 4
"""Batches that exist at a time: one on the device, one being finished, two being decoded."""

Reduced = list[tuple[npt.NDArray[Any], ...]]


@dataclass(slots=True)
class _OfflineBatch:
    """A batch of the decoders' memory, the files that are decoded into it, and what came of them."""

    number: int
    sources: list[ImageSource] = field(default_factory=list)
    images: list[DecodedFile] = field(default_factory=list)
    reduced: Future[Reduced] = field(default_factory=Future)


class LocalPredictor:
    """A model on the first device that fits the settings. A context manager: its threads end with it."""

    def __init__(
        self,
        model: PixelModel,
        settings: Settings,
        options: Options,
        batch_size: int,
        *,
        many: bool = False,
        keeps_encoded: bool = False,
    ) -> None:
        """Loads the model for batches of `batch_size`. `many`: so many images that decoders may take seconds to start;
        `keeps_encoded`: outcomes hold the files' bytes. Raises ModelError, BackendError, CalibrationError.
        """
        if settings.simulate:
            simulated.configure(settings.simulate, settings.cache_dir.expanduser())
        register_operator_libraries(split(settings.operator_libraries))
        self._model = model
        self._settings = settings
        self._options = options
        self._batch_size = batch_size
        # Before the device's thread, whose load says how many threads PyTorch may use there.
        self.decoding = (DecodingProcesses if many else DecodingThreads)(
            Decode(model, settings.max_image_pixels, keeps_encoded),
            settings.decoders or host.core_count(),
            _BATCHES,
            batch_size,
        )
        # Vendors keep the current device and graphs by thread: whatever loads the network also runs it.
        self._device_thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._started: tuple[_OfflineBatch, Started] | None = None
        try:
            self.executable = self._device_thread.submit(self._load).result()
            self.decoding.wait()
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
        """End the device's thread and the decoders, for which it may wait; what has not begun is dropped."""
        self._device_thread.shutdown(cancel_futures=True)
        self.decoding.close()

    def outcomes(self, sources: Iterator[ImageSource]) -> Iterator[FileOutcome]:
        """One outcome a source, in the order of the sources. Raises BackendError when the device fails."""
        free = deque(_OfflineBatch(number) for number in range(_BATCHES))
        under_way: deque[_OfflineBatch] = deque()
        ended: list[tuple[ImageSource, DecodedFile, tuple[npt.NDArray[Any], ...]]] = []
        while True:
            # The decoders get work before this thread finishes what has ended.
            while free:
                if not (taken := list(islice(sources, self._batch_size))):
                    self._device_thread.submit(self._settle)  # No other batch will.
                    break
                batch = free.popleft()
                batch.sources, batch.reduced = taken, Future()
                self.decoding.begin(batch.number, [source.path for source in taken])
                # The device thread waits for the decoders, so that this one need not pass the batch on.
                self._device_thread.submit(self._run, batch)
                under_way.append(batch)
            for source, image, outputs in ended:
                yield self._finish(source, image, outputs)
            if not under_way:
                return
            batch = under_way.popleft()
            reduced = batch.reduced.result()
            ended = list(zip(batch.sources, batch.images, reduced, strict=True))
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

    def _run(self, batch: _OfflineBatch) -> None:
        """In the device thread: a batch onto the device, and then what came of the one before."""
        started: Started | None = None
        try:
            batch.images = self.decoding.finish()  # Every one is waited for before the device reads.
            pixels = self.decoding.pixels[batch.number].numpy()
            if all(image.placement is None for image in batch.images):
                batch.reduced.set_result([() for _ in batch.images])
            elif self.executable.depth > 1:
                started = self.executable.start(pixels)
            else:
                batch.reduced.set_result(self._reduce(self.executable.run(pixels), len(batch.images)))
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
            batch.reduced.set_result(self._reduce(started.outputs(), len(batch.images)))
        except Exception as error:
            batch.reduced.set_exception(error)

    def _reduce(self, outputs: Sequence[npt.NDArray[Any]], count: int) -> Reduced:
        """The small arrays of each image; those of a file that cannot be read mean nothing."""
        return [self._model.reduce(outputs, row, self._options) for row in range(count)]

    def _finish(self, source: ImageSource, image: DecodedFile, outputs: Sequence[npt.NDArray[Any]]) -> FileOutcome:
        if image.placement is None:
            return FileOutcome(source, None, image.error, image.encoded)
        if not all(np.isfinite(array).all() for array in outputs if array.dtype.kind == "f"):
            return FileOutcome(source, None, "the model answered with NaN or infinity", image.encoded)
        prediction = self._model.postprocess(outputs, image.placement, self._options)
        return FileOutcome(source, prediction, "", image.encoded)
