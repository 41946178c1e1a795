"""Predictions for many images in this process: `anychip predict` without `--url`.

    sources ─► decoder threads ─► a few batches of pixels ─► one device thread ─► postprocessing here ─► outcomes

Owns: the way from files to predictions without a service. While the device computes a batch, the decoder threads fill
the next ones, and this thread finishes the one before. Memory stays flat: a fixed number of batches exists.
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
import torch

from app.config import Settings, split
from app.decoders.decoder import decode_into
from app.images.header import ImageError, check_pixels, read_header
from app.precision.gate import compile_options
from app.precision.probes import Calibration, probes
from app.tools.image_sources import ImageSource
from app.tools.outcomes import FileOutcome
from backends import Executable, Unbuilt, choose, host, register_operator_libraries, simulated
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
    """Pixels, uint8 [batch size, *input shape], and the images that are decoded into them."""

    pixels: torch.Tensor
    parts: list[Future[list[_Decoded]]] = field(default_factory=list)
    reduced: Future[Reduced] | None = None


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
        # Vendors keep the current device and graphs by thread: whatever loads the network also runs it.
        self._device_thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._threads = settings.decoders or host.core_count()
        self._decoders = ThreadPoolExecutor(self._threads, thread_name_prefix="decode")
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
        self._decoders.shutdown(cancel_futures=True)
        self._device_thread.shutdown(cancel_futures=True)

    def outcomes(self, sources: Iterator[ImageSource]) -> Iterator[FileOutcome]:
        """One outcome a source, in the order of the sources. Raises BackendError when the device fails."""
        shape = (self._batch_size, *self._model.input_shape)
        free = deque(_OfflineBatch(torch.zeros(shape, dtype=torch.uint8)) for _ in range(_BATCHES))
        under_way: deque[_OfflineBatch] = deque()
        while True:
            while free and (taken := list(islice(sources, self._batch_size))):
                batch = free.popleft()
                batch.parts = self._decode_all(taken, batch.pixels)
                # The device thread waits for the decoders, so that this one need not pass the batch on.
                batch.reduced = self._device_thread.submit(self._run, batch)
                under_way.append(batch)
            if not under_way:
                return
            batch = under_way.popleft()
            assert batch.reduced is not None
            reduced = batch.reduced.result()
            images = [image for part in batch.parts for image in part.result()]
            free.append(batch)
            for image, outputs in zip(images, reduced, strict=True):
                yield self._finish(image, outputs)

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
        size = -(-len(sources) // self._threads)

        def decode_some(first: int) -> list[_Decoded]:
            some = enumerate(sources[first : first + size], first)
            return [self.decode(source, pixels[row]) for row, source in some]

        return [self._decoders.submit(decode_some, first) for first in range(0, len(sources), size)]

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

    def _run(self, batch: _OfflineBatch) -> Reduced:
        """In the device thread: the small arrays of each image; those of a file that cannot be read mean nothing."""
        decoded = [
            image for part in batch.parts for image in part.result()
        ]  # Every one is waited for before the device reads.
        if all(image.placement is None for image in decoded):
            return [() for _ in decoded]
        outputs = self.executable.run(batch.pixels.numpy())
        return [self._model.reduce(outputs, row, self._options) for row in range(len(decoded))]

    def _finish(self, image: _Decoded, outputs: Sequence[npt.NDArray[Any]]) -> FileOutcome:
        if image.placement is None:
            return FileOutcome(image.source, None, image.error, image.encoded)
        if not all(np.isfinite(array).all() for array in outputs if array.dtype.kind == "f"):
            return FileOutcome(image.source, None, "the model answered with NaN or infinity", image.encoded)
        prediction = self._model.postprocess(outputs, image.placement, self._options)
        return FileOutcome(image.source, prediction, "", image.encoded)
