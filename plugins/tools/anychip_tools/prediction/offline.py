"""Predictions for many images in this process: `anychip predict` without `--url`.

    sources ─► decoders ─► a few blocks of batches ─► one device thread ─► postprocessing here ─► outcomes

Owns: the way from files to predictions without a service. While the device computes a block, batch after batch, the
decoders fill the next blocks, and this thread finishes the last one. A device that takes two batches at a time gets
the next batch before the answers of the last are read. Memory stays flat: a fixed number of blocks exists.

A block of small images holds several batches. Threads and processes wait for each other once a block: with images
of a third of a millisecond, waking each other once a batch took a tenth of the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from anychip_tools.prediction.image_sources import ImageSource
from anychip_tools.prediction.offline_decoding import Decode, DecodedFile, DecodingProcesses, DecodingThreads
from anychip_tools.prediction.outcomes import FileOutcome
from anychip_tools.subjects import load, open_device
from app.config import Settings
from app.precision.probes import probes
from backends import Executable, Started, host
from models import Options, PixelModel

_BLOCKS = 4
"""Number of blocks: one on the device, one being finished, two being decoded."""
_BLOCK_BATCHES = 8
_BLOCK_BYTES = 16 << 20
"""Largest size of a block; a larger batch is a block alone."""

Reduced = list[tuple[npt.NDArray[Any], ...]]


@dataclass(slots=True)
class _OfflineBatch:
    """Files that the device computes together, and their results."""

    sources: list[ImageSource]
    images: list[DecodedFile] = field(default_factory=list)
    reduced: Future[Reduced] = field(default_factory=Future)


@dataclass(slots=True)
class _Block:
    """Batches in one piece of the decoders' memory."""

    number: int
    batches: list[_OfflineBatch]


class LocalPredictor:
    """Model on the first device that fits the settings. Context manager: its threads end with it."""

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
        """Load the model for batches of `batch_size`. `many`: so many images that decoders may take seconds
        to start; `keeps_encoded`: outcomes hold the files' bytes. Raises ModelError, BackendError, CalibrationError.
        """
        self._model, self.model, self.weights = model, model.name, model.weights
        self._settings = settings
        self._options = options
        self._batch_size = batch_size
        # If the files' bytes are kept, a block holds one batch only.
        batch_bytes = batch_size * math.prod(model.input_shape)
        batches = max(1, min(_BLOCK_BATCHES, _BLOCK_BYTES // batch_bytes)) if many and not keeps_encoded else 1
        self.block_size = batches * batch_size
        # Before the device's thread: its load sets the number of PyTorch's threads there.
        self.decoding = (DecodingProcesses if many else DecodingThreads)(
            Decode(model, settings.max_image_pixels, keeps_encoded),
            settings.decoders or host.core_count(),
            _BLOCKS,
            self.block_size,
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

    def close(self) -> None:
        """End the device's thread and the decoders, waiting for running work; drop what has not begun."""
        self._device_thread.shutdown(cancel_futures=True)
        self.decoding.close()

    def outcomes(self, sources: Iterator[ImageSource]) -> Iterator[FileOutcome]:
        """Yield one outcome a source, in the order of the sources. Raises BackendError if the device fails."""
        free = deque(range(_BLOCKS))
        under_way: deque[_Block] = deque()
        self._begin(free, under_way, sources)
        while under_way:
            block = under_way.popleft()
            for batch in block.batches:
                reduced = batch.reduced.result()
                if batch is block.batches[-1]:  # The decoders get work before this thread finishes the batch.
                    free.append(block.number)
                    self._begin(free, under_way, sources)
                yield from self._finished(batch, reduced)

    def _begin(self, free: deque[int], under_way: deque[_Block], sources: Iterator[ImageSource]) -> None:
        """Start to decode the next files into the free blocks, and to compute them."""
        while free:
            if not (taken := list(islice(sources, self.block_size))):
                self._device_thread.submit(self._settle)  # No later batch does it.
                return
            firsts = range(0, len(taken), self._batch_size)
            batches = [_OfflineBatch(taken[first : first + self._batch_size]) for first in firsts]
            block = _Block(free.popleft(), batches)
            self.decoding.begin(block.number, [source.path for source in taken])
            # The device thread waits for the decoders, so that this thread need not pass the block on.
            self._device_thread.submit(self._run, block)
            under_way.append(block)

    def _load(self) -> Executable:
        settings, model = self._settings, self._model
        choice, _ = open_device(settings)
        how = {"engine": settings.engine, "precision": settings.precision}
        return load(model, settings, choice, **how, sizes=(self._batch_size,), items=probes(model)).executable

    def _run(self, block: _Block) -> None:
        """Run a block on the device, batch after batch, in the device thread."""
        try:
            images = self.decoding.finish()  # Waits for every image before the device reads.
        except Exception as error:  # Raised again by the wait for the batch.
            self._settle()
            for batch in block.batches:
                batch.reduced.set_exception(error)
            return
        pixels = self.decoding.pixels[block.number].numpy()
        for number, batch in enumerate(block.batches):
            first = number * self._batch_size
            batch.images = images[first : first + len(batch.sources)]
            self._compute(batch, pixels[first : first + self._batch_size])

    def _compute(self, batch: _OfflineBatch, pixels: npt.NDArray[np.uint8]) -> None:
        """Start a batch on the device, then settle the one before, in the device thread."""
        started: Started | None = None
        try:
            if all(image.placement is None for image in batch.images):
                batch.reduced.set_result([() for _ in batch.images])
            elif self.executable.depth > 1:
                started = self.executable.start(pixels)
            else:
                batch.reduced.set_result(self._reduce(self.executable.run(pixels), len(batch.images)))
        except Exception as error:
            batch.reduced.set_exception(error)
        self._settle()
        self._started = None if started is None else (batch, started)

    def _settle(self) -> None:
        """Wait for the batch that is on the device, if one is, in the device thread."""
        if self._started is None:
            return
        (batch, started), self._started = self._started, None
        try:
            batch.reduced.set_result(self._reduce(started.outputs(), len(batch.images)))
        except Exception as error:
            batch.reduced.set_exception(error)

    def _reduce(self, outputs: Sequence[npt.NDArray[Any]], count: int) -> Reduced:
        """Return the small arrays of each image; those of an unreadable file mean nothing."""
        return [self._model.reduce(outputs, row, self._options) for row in range(count)]

    def _finished(self, batch: _OfflineBatch, reduced: Reduced) -> Iterator[FileOutcome]:
        """Yield the outcome of each file of a batch."""
        finite = _is_finite(reduced)
        errors, outputs, placements = [], [], []
        for image, arrays in zip(batch.images, reduced, strict=True):
            error = image.error
            if image.placement is not None:
                if finite or _is_finite([arrays]):
                    outputs.append(arrays)
                    placements.append(image.placement)
                else:
                    error = "the model answered with NaN or infinity"
            errors.append(error)
        predictions = iter(self._model.postprocess_all(outputs, placements, self._options))
        for source, image, error in zip(batch.sources, batch.images, errors, strict=True):
            yield FileOutcome(source, None if error else next(predictions), error, image.encoded)


def _is_finite(reduced: Reduced) -> bool:
    """Return True if no array holds NaN or infinity."""
    numbers = [array.ravel() for arrays in reduced for array in arrays if array.dtype.kind == "f"]
    return not numbers or bool(np.isfinite(np.concatenate(numbers)).all())
