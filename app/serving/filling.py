"""What fills a slot: an encoded image, an image's pixels, a row of tensors.

Owns: the ways into a slot, and which of them leave the event loop. Must not know queues, deadlines or answers. A slot
is the network's input of one item; these functions own it only while they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from app.errors import ServiceError
from app.images.decoding import decode
from app.images.header import Header, ImageTooLargeError, InvalidImageError, check_pixels, read_header
from app.images.pool import DecodePool, DecodeQueueFullError
from app.scheduling.served_model import ServedModel
from models import Model, PixelModel, Placement, TensorModel

Encoded = bytes | bytearray | memoryview
Slot = npt.NDArray[np.uint8]

INLINE_BYTES = 1 << 20
"""Arrays up to this size are copied in the event loop: a hop to a thread would cost more."""
_NOWHERE = Placement(0, 0)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Frame:
    """An image that needs no decoding.

    `placed`: it is the network's input as it is, in whatever type and order; else uint8 [height, width, 3], and resized
    as a decoded image would be.
    """

    pixels: npt.NDArray[Any]
    width: int
    height: int
    placed: bool = True


class Filling:
    """Into the slots of a service's models. `reads_pixels`: whether anybody looks at them; the null device does not."""

    def __init__(self, pool: DecodePool, max_image_pixels: int, *, reads_pixels: bool) -> None:
        self._pool, self._max_image_pixels, self._reads_pixels = pool, max_image_pixels, reads_pixels

    async def image(self, served: ServedModel, image: Encoded | Frame, slot: Slot) -> Placement:
        """An image, encoded or not. Raises INVALID_IMAGE, IMAGE_TOO_LARGE, QUEUE_FULL."""
        try:
            if isinstance(image, Frame):
                return await self._frame(served.model, image, slot)
            return await self._encoded(served.model, image, slot)
        except DecodeQueueFullError as error:
            served.metrics.rejected["decode_queue_full"].inc()
            raise ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=1) from None
        except ImageTooLargeError as error:
            raise ServiceError("IMAGE_TOO_LARGE", str(error)) from None
        except InvalidImageError as error:
            raise ServiceError("INVALID_IMAGE", str(error)) from None

    async def row(self, model: TensorModel, inputs: Mapping[str, npt.NDArray[Any]], row: int, slot: Slot) -> Placement:
        """One row of a request's tensors, which has no placement."""
        if slot.nbytes <= INLINE_BYTES:
            model.pack(inputs, row, slot)
        else:
            await self._pool.run(model.pack, inputs, row, slot)
        return _NOWHERE

    async def _encoded(self, model: Model, body: Encoded, slot: Slot) -> Placement:
        header = read_header(body)
        check_pixels(header, self._max_image_pixels)
        if not self._reads_pixels:
            return Placement(header.width, header.height)
        assert isinstance(model, PixelModel)
        target = torch.from_numpy(slot).view(model.input_shape)
        pixels = header.width * header.height
        return await self._pool.decode(decode_into, model, body, header, target, pixels=pixels)

    async def _frame(self, model: Model, frame: Frame, slot: Slot) -> Placement:
        if not self._reads_pixels:
            return Placement(frame.width, frame.height)
        if frame.placed:
            slot[:] = np.ascontiguousarray(frame.pixels).reshape(-1).view(np.uint8)
            return Placement(frame.width, frame.height)
        assert isinstance(model, PixelModel)
        target = torch.from_numpy(slot).view(model.input_shape)
        return await self._pool.decode(_place, model, frame, target, pixels=frame.width * frame.height)


def decode_into(model: PixelModel, body: Encoded, header: Header, target: torch.Tensor) -> Placement:
    """Decode one image and place it in `target`, uint8 `model.input_shape`. Raises InvalidImageError."""
    size = model.decode_size(header.width, header.height)
    return model.preprocess(decode(body, header, size), target, header.width, header.height)


def _place(model: PixelModel, frame: Frame, target: torch.Tensor) -> Placement:
    # A copy: torch wants memory that may be written to, and a body may not.
    pixels = torch.from_numpy(np.array(frame.pixels))
    return model.preprocess(pixels, target, frame.width, frame.height)
