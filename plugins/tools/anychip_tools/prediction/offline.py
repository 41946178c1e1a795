"""Predictions for many images in this process: `anychip predict` without `--url`.

While the device computes a block, batch after batch, the decoders fill the next ones, and this thread finishes the
last. A block of small images holds several batches: with images of a third of a millisecond, waking each other once a
batch took a tenth of the time. Decoders are threads: reading a file and decoding it leave the interpreter's lock.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anychip_tools.prediction.files import FileOutcome, ImageSource
from anychip_tools.subjects import load, open_device
from app.config import Settings
from app.decoder.decoder import decode_into
from app.images.header import ImageError, check_pixels, read_header
from app.precision.probes import probes
from backends import Executable, Started, host
from models import Options, PixelModel, Placement

_BLOCKS = 4
"""Number of blocks: one on the device, one being finished, two being decoded."""
_BLOCK_BATCHES = 8
_BLOCK_BYTES = 16 << 20
"""Largest size of a block; a larger batch is a block alone."""
_MOST_PARTS = 16
"""Most parts of a block: more would wake each other too often, fewer would end at different times."""

Reduced = list[tuple[npt.NDArray[Any], ...]]


class DecodedFile(NamedTuple):
    """Place of a file's image in the network's input, or why it cannot be read. `encoded`: the file, if wanted."""

    placement: Placement | None
    error: str
    encoded: bytes | None


@dataclass(slots=True)
class _Batch:
    """Files that the device computes together, from the row `first` of a block on; `parts`: the block's files."""

    sources: list[ImageSource]
    block: int
    first: int
    parts: list[Future[list[DecodedFile]]]
    ends_block: bool = False
    images: list[DecodedFile] = field(default_factory=list)
    started: Future[Started | None] = field(default_factory=Future)
    reduced: Future[Reduced] = field(default_factory=Future)


class LocalPredictor:
    """Model on the first device that fits the settings. `close` ends its threads.

    `pixels`: of each block, uint8 [block_size, *input_shape].
    """

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
        """Load the model for batches of `batch_size`. `many`: so many images that a block has
        several batches; `keeps_encoded`: outcomes hold the bytes. Raises ModelError, BackendError, CalibrationError.
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
        self._keeps_encoded = keeps_encoded
        self._decoders = settings.decoders or host.core_count()
        self.pixels = [torch.zeros(self.block_size, *model.input_shape, dtype=torch.uint8) for _ in range(_BLOCKS)]
        self._decoding = ThreadPoolExecutor(self._decoders, thread_name_prefix="decode")
        # A pool starts a thread when it gets work and none is idle: all begin now, before another number is set.
        started = threading.Barrier(self._decoders)
        list(self._decoding.map(lambda _: _compute_alone(started), range(self._decoders)))
        # Vendors keep the current device and graphs by thread: whatever loads the network also runs it.
        self._device_thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._unread: _Batch | None = None
        try:
            self.executable = self._device_thread.submit(self._load).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the device's thread and the decoders, waiting for running work; drop what has not begun."""
        self._device_thread.shutdown(cancel_futures=True)
        self._decoding.shutdown(cancel_futures=True)

    def outcomes(self, sources: Iterator[ImageSource]) -> Iterator[FileOutcome]:
        """Yield one outcome a source, in the order of the sources. Raises BackendError if the device fails."""
        free = deque(range(_BLOCKS))
        under_way: deque[_Batch] = deque()
        self._begin(free, under_way, sources)
        while under_way:
            batch = under_way.popleft()
            reduced = batch.reduced.result()
            if batch.ends_block:  # The decoders get work before this thread finishes the batch.
                free.append(batch.block)
                self._begin(free, under_way, sources)
            yield from self._finished(batch, reduced)

    def _begin(self, free: deque[int], under_way: deque[_Batch], sources: Iterator[ImageSource]) -> None:
        while free and (taken := list(islice(sources, self.block_size))):
            block = free.popleft()
            parts = self.decode(block, [source.path for source in taken])
            for first in range(0, len(taken), self._batch_size):
                batch = _Batch(taken[first : first + self._batch_size], block, first, parts)
                under_way.append(batch)
                # The device thread waits for the decoders, so that this thread need not pass the batch on.
                batch.started = self._device_thread.submit(self._start, batch)
                self._read()  # A device that takes two batches has the next before the answers of the last are read.
                self._unread = batch
                if self.executable.depth == 1:
                    self._read()
            batch.ends_block = True
        if free:  # No later batch does it.
            self._read()

    def decode(self, block: int, paths: Sequence[str]) -> list[Future[list[DecodedFile]]]:
        """Start to decode files into the first rows of a block; return its parts, in the order of the paths.

        There are two for each decoder, so that an idle one takes work of one held up.
        """
        size = -(-len(paths) // min(2 * self._decoders, _MOST_PARTS))

        def decoded(first: int) -> list[DecodedFile]:
            part = paths[first : first + size]
            return [self._decoded(path, row) for path, row in zip(part, self.pixels[block][first:], strict=False)]

        return [self._decoding.submit(decoded, first) for first in range(0, len(paths), size)]

    def _decoded(self, path: str, row: Tensor) -> DecodedFile:
        encoded, placement, error = None, None, ""
        try:
            with open(path, "rb", buffering=0) as file:
                encoded = file.readall()
            header = read_header(encoded)
            check_pixels(header, self._settings.max_image_pixels)
            placement = decode_into(self._model, encoded, header, row)
        except ImageError as refusal:
            error = str(refusal)
        except OSError as failure:
            error = failure.strerror or str(failure)
        return DecodedFile(placement, error, encoded if self._keeps_encoded else None)

    def _read(self) -> None:
        """Let the device thread read the answers of the batch that it starts last, if one is left."""
        if self._unread is not None:
            self._unread.reduced = self._device_thread.submit(self._reduced, self._unread)
            self._unread = None

    def _load(self) -> Executable:
        settings, model = self._settings, self._model
        choice, _ = open_device(settings)
        how = {"engine": settings.engine, "precision": settings.precision}
        return load(model, settings, choice, **how, sizes=(self._batch_size,), items=probes(model)).executable

    def _start(self, batch: _Batch) -> Started | None:
        images = [image for part in batch.parts for image in part.result()]  # Every one, before the device reads.
        rows = slice(batch.first, batch.first + self._batch_size)
        batch.images = images[rows]
        if all(image.placement is None for image in batch.images):
            return None
        return self.executable.start(self.pixels[batch.block].numpy()[rows])

    def _reduced(self, batch: _Batch) -> Reduced:
        """Return the small arrays of each image; those of an unreadable file mean nothing."""
        started = batch.started.result()
        if started is None:
            return [()] * len(batch.images)
        outputs = started.outputs()
        return [self._model.reduce(outputs, row, self._options) for row in range(len(batch.images))]

    def _finished(self, batch: _Batch, reduced: Reduced) -> Iterator[FileOutcome]:
        finite = _is_finite(reduced)
        errors, outputs, placements = [], [], []
        for image, arrays in zip(batch.images, reduced, strict=True):
            error = image.error
            if image.placement is not None:
                if finite or _is_finite([arrays]):
                    outputs.append(arrays)
                    placements.append(image.placement)
                else:
                    error = "the model answered with NaN, infinity, a score above 1 or a class beyond its labels"
            errors.append(error)
        predictions = iter(self._model.postprocess_all(outputs, placements, self._options))
        for source, image, error in zip(batch.sources, batch.images, errors, strict=True):
            yield FileOutcome(source, None if error else next(predictions), error, image.encoded)


def _compute_alone(started: threading.Barrier) -> None:
    """Let a thread compute alone: an image is too small to share among threads that wait for each other.

    PyTorch keeps the number of threads of an operation by calling thread, from the thread's first query on.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)
    started.wait()


def _is_finite(reduced: Reduced) -> bool:
    numbers = [array.ravel() for arrays in reduced for array in arrays if array.dtype.kind == "f"]
    return not numbers or bool(np.isfinite(np.concatenate(numbers)).all())
