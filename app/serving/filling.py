"""What fills a slot: an encoded image, an image's pixels, a row of tensors.

Owns: the ways into a slot, which of them leave the event loop, and the errors that a client hears of them. Must not
know queues or answers. A slot is the network's input of one item. Images are parsed by decoder processes, and here only
where nobody looks at their pixels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from app.access.limits import ClientLease
from app.decoder.messages import Region, pack_regions
from app.decoding.image import DecodeExpiredError, DecodeFailedError
from app.decoding.pool import Decoders
from app.decoding.waiting import DecodeQueueFullError
from app.errors import ServiceError
from app.fleet.outcome import too_late
from app.fleet.served_model import ModelPool
from app.images.header import ImageTooLargeError, InvalidImageError, check_pixels, read_header
from app.processes.arena import Arena
from app.scheduling.scheduler import PRIORITY_WORTH_S, REQUEST_SHARE
from app.serving.terms import Terms
from app.serving.threads import Threads
from models import Placement, TensorModel

log = logging.getLogger("anychip.service")

Encoded = bytes | bytearray | memoryview

INLINE_BYTES = 1 << 20
"""Arrays up to this size are copied in the event loop: a hop to a thread would cost more."""
_NOWHERE = Placement(0, 0)


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
    """Into the slots of a service's models. Whatever of it raises has given the slot back, or will."""

    def __init__(
        self, arena: Arena, threads: Threads, max_image_pixels: int, decoders: Decoders | None, *, reads_pixels: bool
    ) -> None:
        """`decoders`: None where nothing is to be decoded. `reads_pixels`: whether anybody looks at pixels; the null
        device does not.
        """
        self._arena, self._threads, self._decoders = arena, threads, decoders
        self._max_image_pixels, self._reads_pixels = max_image_pixels, reads_pixels

    async def image(
        self, served: ModelPool, terms: Terms, image: Encoded | Frame, slot: int, position: int
    ) -> Placement:
        """An image, encoded or not. Raises INVALID_IMAGE, IMAGE_TOO_LARGE, QUEUE_FULL, DEADLINE_EXCEEDED."""
        with _as_clients_hear(served):
            if isinstance(image, Frame) and (image.placed or not self._reads_pixels):
                return self._copied(served, image, slot)
            decoders = self._decoders if self._reads_pixels else None
            client_lease = _counting(terms)
            if not isinstance(image, Frame) and (decoders is None or client_lease is not None):
                with _given_back(served, slot):
                    width, height = self._measured(image, client_lease)
                if decoders is None:
                    return Placement(width, height)
            return await self._decoded(served, terms, image, slot, position)

    async def regions(
        self,
        served: ModelPool,
        terms: Terms,
        image: Encoded,
        slots: Sequence[int],
        regions: Sequence[Region],
        *,
        position: int,
    ) -> None:
        """Regions of one image, each into a slot, all or none. Raises as `image`; then all slots are given back."""
        if self._decoders is None or not self._reads_pixels:
            return

        def give(_: int) -> None:
            for slot in slots:
                served.slots.give(slot)

        with _as_clients_hear(served):
            await self._decoders.decode(
                served.index,
                slots[0],
                image,
                give=give,
                deadline_s=terms.deadline_s,
                rank_s=self._rank_s(terms, position),
                client=terms.client,
                tail=pack_regions(slots, regions),
                count=len(regions),
            )

    def size_of(self, served: ModelPool, terms: Terms, image: Encoded) -> tuple[int, int]:
        """Width and height of an image as displayed, by its header alone; its pixels count from now on.

        Raises INVALID_IMAGE, IMAGE_TOO_LARGE, QUEUE_FULL.
        """
        with _as_clients_hear(served):
            return self._measured(image, _counting(terms))

    async def row(
        self, served: ModelPool, model: TensorModel, inputs: Mapping[str, npt.NDArray[Any]], slot: int, position: int
    ) -> Placement:
        """The row at `position` of a request's tensors, which has no placement."""
        target = self._arena.slot(served.index, slot)
        with _given_back(served, slot):
            if target.nbytes <= INLINE_BYTES:
                model.pack(inputs, position, target)
            else:
                await self._threads.run(model.pack, inputs, position, target)
        return _NOWHERE

    async def _decoded(
        self, served: ModelPool, terms: Terms, image: Encoded | Frame, slot: int, position: int
    ) -> Placement:
        """By a decoder process, in the order in which a queue would take the images."""
        decoders = self._decoders
        assert decoders is not None
        rank_s = self._rank_s(terms, position)
        size = None
        if isinstance(image, Frame):
            size = image.width, image.height
            image = image.pixels.tobytes()
        decode = partial(
            decoders.decode,
            served.index,
            body=image,
            give=served.slots.give,
            deadline_s=terms.deadline_s,
            rank_s=rank_s,
            client=terms.client,
        )

        async def again(slot: int) -> None:
            """The image after all, where its file lay in the slot for a device to decode. Raises as `image`."""
            with _as_clients_hear(served):
                await decode(slot, again=True)

        passed = partial(served.slots.files.__setitem__, slot, again) if served.passes_files else None
        return await decode(slot, size=size, passed=passed)

    def _rank_s(self, terms: Terms, position: int) -> float:
        """Of the image at a position of its request, in the order of what waits for decoders."""
        assert self._decoders is not None
        behind_s = position * self._decoders.seconds_an_image / REQUEST_SHARE if position else 0.0
        return time.monotonic() + behind_s - terms.priority * PRIORITY_WORTH_S

    def _copied(self, served: ModelPool, frame: Frame, slot: int) -> Placement:
        """Pixels that are the network's input as they are."""
        with _given_back(served, slot):
            if self._reads_pixels:
                target = self._arena.slot(served.index, slot)
                target[:] = np.ascontiguousarray(frame.pixels).reshape(-1).view(np.uint8)
        return Placement(frame.width, frame.height)

    def _measured(self, image: Encoded, client_lease: ClientLease | None) -> tuple[int, int]:
        """Width and height by the header; `client_lease`: what they count against."""
        header = read_header(image)
        check_pixels(header, self._max_image_pixels)
        if client_lease is not None:
            client_lease.hold_pixels(header.width * header.height)
        return header.width, header.height


def _counting(terms: Terms) -> ClientLease | None:
    """What an image's pixels count against; None where they are not limited, so that no header is read for it."""
    return terms.client_lease if terms.client_lease is not None and terms.client_lease.counts_pixels else None


class _as_clients_hear:  # noqa: N801 - reads as what it is: with _as_clients_hear(served)
    """The errors of decoding, in the service's words."""

    __slots__ = ("_served",)

    def __init__(self, served: ModelPool) -> None:
        self._served = served

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, DecodeQueueFullError):
            self._served.metrics.rejected["decode_queue_full"].inc()
            raise ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=1) from None
        if isinstance(error, DecodeExpiredError):
            self._served.metrics.expired["decode"].inc()
            raise too_late() from None
        if isinstance(error, ImageTooLargeError):
            raise ServiceError("IMAGE_TOO_LARGE", str(error)) from None
        if isinstance(error, InvalidImageError):
            raise ServiceError("INVALID_IMAGE", str(error)) from None
        if isinstance(error, DecodeFailedError):
            log.error("an image could not be decoded: %s", error)
            raise ServiceError("INTERNAL", "internal error; quote the request id") from None


class _given_back:  # noqa: N801 - as above
    """The slot is free again when the work in it raises."""

    __slots__ = ("_served", "_slot")

    def __init__(self, served: ModelPool, slot: int) -> None:
        self._served, self._slot = served, slot

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._served.slots.give(self._slot)
