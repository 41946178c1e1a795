"""Filling of slots: from an encoded image, parts of one, an image's pixels, or a row of tensors.

Owns: the ways into a slot, which of them leave the event loop, and the errors that a client hears of them. Must not
know queues or answers. A slot is the network's input of one item. Decoder processes parse images. This process reads
headers only: to count a client's pixels, to pass a file to a device that decodes, or if the device reads no pixels.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from app import clock
from app.decoder.messages import Kind
from app.decoding.pool import Decoders
from app.decoding.waiting import DecodeQueueFullError, DecodeTooLateError, Outcome, PendingImage
from app.errors import ServiceError, internal_error
from app.fleet.submission import ModelPool, Submission
from app.images.header import ImageError
from app.images.passing import plain_header, write_file
from app.link import INLINE_BYTES, Content, Encoded, Frame, Regions, TensorRow, Terms, image_refusal, measured, too_late
from app.processes.arena import Arena
from app.processes.channel import to_packet
from app.scheduling.line import PRIORITY_WORTH_S, rank_s
from app.scheduling.queue import ENDED
from models import PixelModel, Placement, TensorModel

log = logging.getLogger("anychip.service")

_MOST_SIZES = 4096
"""Most image sizes kept for a model: cameras produce few sizes."""

Filled = Callable[[Submission, ServiceError | None], None]
"""Callback, once for each submission: it has its placement, or there is an error. No process writes to the slot any
more."""


class Filling:
    """Writer of contents into the slots of a service's models."""

    def __init__(
        self, arena: Arena, max_image_pixels: int, decoders: Decoders | None, filled: Filled, *, reads_pixels: bool
    ) -> None:
        """Fill slots of `arena`. `decoders`: None if nothing is to be decoded. `reads_pixels`: False for the null
        device, which looks at no pixels.
        """
        self._arena, self._filled, self._reads_pixels = arena, filled, reads_pixels
        self._decoders = decoders if reads_pixels else None
        self._max_image_pixels = max_image_pixels
        # By the model's number, with the object that it was for: after a load that is another.
        self._placements: dict[int, tuple[PixelModel, dict[tuple[int, int], Placement | None]]] = {}

    def wait_s(self, pool: ModelPool, terms: Terms, images: int) -> float | None:
        """Return the seconds that the last of `images` new images of a request will wait for a decoder; None while
        unknown.
        """
        if self._decoders is None or pool.passes_files or not isinstance(pool.model, PixelModel):
            return 0.0
        return self._decoders.wait_s(pool.index, terms.priority * PRIORITY_WORTH_S, terms.client, images)

    def fill(self, items: Sequence[Submission], content: Content, needed_s: float = math.inf) -> None:
        """Fill the slots of items: one, or as many as there are regions. `needed_s`: a later fill is too late."""
        item = items[0]
        try:
            if isinstance(content, (bytes, bytearray, memoryview)):
                self._image(item, content, needed_s)
            elif isinstance(content, TensorRow):
                self._pack(item, content)
            elif isinstance(content, Frame) and (content.placed or not self._reads_pixels):
                if self._reads_pixels:
                    pixels = np.ascontiguousarray(content.pixels)
                    self._arena.slot(item.pool.index, item.slot)[:] = pixels.reshape(-1).view(np.uint8)
                self._placed(item, Placement(content.width, content.height))
            elif isinstance(content, Frame):
                data = content.pixels.tobytes()
                self._decode(items, data, Kind.PIXELS, content.width, content.height, needed_s=needed_s)
            else:
                self._decode_regions(items, content, needed_s)
        except ServiceError as error:
            for each in items:
                self._filled(each, error)
        except Exception:
            log.exception("a slot could not be filled")
            for each in items:
                self._filled(each, internal_error())

    def drop(self, item: Submission) -> None:
        """Stop decoding for an item that nobody waits for any more."""
        if item.image is not None and self._decoders is not None:
            self._decoders.drop(item.image)

    def _image(self, item: Submission, image: Encoded, needed_s: float) -> None:
        lease = item.terms.client_lease
        if self._decoders is None:
            self._placed(item, Placement(*measured(image, lease, self._max_image_pixels)))
            return
        if lease is not None and lease.counts_pixels:  # Else no header is read for it.
            measured(image, lease, self._max_image_pixels)
        if not (item.pool.passes_files and self._passed(item, image)):
            self._decode((item,), image, Kind.ENCODED, needed_s=needed_s)

    def _placed(self, item: Submission, placement: Placement) -> None:
        item.placement = placement
        self._filled(item, None)

    def _passed(self, item: Submission, image: Encoded) -> bool:
        """Put the file itself into the slot, if a device decodes it just as a decoder would; else return False.

        A decoder answers for all other files, broken ones included. A file that does not fit is not read; the slot
        bounds the cost of the rest.
        """
        model, slot = item.pool.model, self._arena.slot(item.pool.index, item.slot)
        assert isinstance(model, PixelModel)
        data = memoryview(image)
        plain = plain_header(data, len(slot))
        if plain is None:
            return False
        header, first_scan = plain
        placement = self._placement_by_device(item.pool.index, model, (header.width, header.height))
        if placement is None or header.width * header.height > self._max_image_pixels:
            return False
        write_file(slot, data, header, first_scan)
        rank_s = self._rank_s(item.terms, item.position)
        item.refill = lambda item: self._decode((item,), image, Kind.ENCODED, rank_s=rank_s)
        self._placed(item, placement)
        return True

    def _placement_by_device(self, pool: int, model: PixelModel, size: tuple[int, int]) -> Placement | None:
        """Return the placement of an image of this size, or None if the device cannot decode it as a decoder would."""
        of, placements = self._placements.get(pool, (None, {}))
        if of is not model or len(placements) > _MOST_SIZES:
            placements = {}
            self._placements[pool] = model, placements
        if size not in placements:
            possible = model.geometry(*size) is not None and model.decode_size(*size) == size
            placements[size] = model.placement(*size) if possible else None
        return placements[size]

    def _decode(
        self,
        items: Sequence[Submission],
        image: Encoded,
        kind: Kind,
        width: int = 0,
        height: int = 0,
        *,
        tail: bytes = b"",
        needed_s: float = math.inf,
        rank_s: float | None = None,
    ) -> None:
        """Let a decoder process decode the image for its items, in the queue's order; `rank_s`: the old rank of an
        image that returns.
        """
        assert self._decoders is not None
        first, again = items[0], rank_s is not None
        rank = self._rank_s(first.terms, items[-1].position) if rank_s is None else rank_s
        pending = PendingImage(
            first.pool.index,
            rank,
            image,
            self._decoded,
            kind,
            first.slot,
            width,
            height,
            tail,
            needed_s,
            wanted=len(items),
            items=items,
        )
        for item in items:
            item.image = pending
        self._decoders.decode(pending, client=first.terms.client, again=again)

    def _decode_regions(self, items: Sequence[Submission], content: Regions, needed_s: float) -> None:
        """Decode regions of one image, each into the slot of an item, all or none."""
        model = items[0].pool.model
        assert isinstance(model, PixelModel)
        for item, region in zip(items, content.regions, strict=True):
            item.placement = model.placement(*region.size)
        if self._decoders is None:
            for item in items:
                self._filled(item, None)
            return
        tail = to_packet([(item.slot, region) for item, region in zip(items, content.regions, strict=True)])
        self._decode(items, content.image, Kind.REGIONS, tail=tail, needed_s=needed_s)

    def _decoded(self, image: PendingImage, outcome: Outcome) -> None:
        """Continue with the items of an image that no decoder has any more. An error concerns those who still wait."""
        items: Sequence[Submission] = image.items
        error = None
        if not isinstance(outcome, Placement) and not all(item.status is ENDED for item in items):
            error = client_error(items[0].pool, outcome)
        for item in items:
            item.image = None
            if isinstance(outcome, Placement) and image.kind is not Kind.REGIONS:
                item.placement = outcome
            self._filled(item, error)

    def _pack(self, item: Submission, row: TensorRow) -> None:
        """Pack a row of tensors into the slot; it has no placement."""
        model, target = item.pool.model, self._arena.slot(item.pool.index, item.slot)
        assert isinstance(model, TensorModel)
        if target.nbytes <= INLINE_BYTES:
            model.pack(row.inputs, item.position, target)
            self._filled(item, None)
            return
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, model.pack, row.inputs, item.position, target).add_done_callback(
            partial(self._packed, item)
        )

    def _packed(self, item: Submission, packing: asyncio.Future[None]) -> None:
        if packing.cancelled() or (error := packing.exception()) is not None:
            log.error("a slot could not be filled", exc_info=None if packing.cancelled() else error)
            self._filled(item, internal_error())
        else:
            self._filled(item, None)

    def _rank_s(self, terms: Terms, position: int) -> float:
        """Return the rank, among the images that wait for decoders, of an image at a position of its request."""
        assert self._decoders is not None
        return rank_s(clock.monotonic(), position, self._decoders.seconds_an_image, terms.priority)


def client_error(pool: ModelPool, error: Exception) -> ServiceError:
    """Return the service's error for a decoding error; count a full queue or a late image."""
    if isinstance(error, DecodeQueueFullError):
        pool.metrics.rejected["decode_queue_full"].inc()
        return ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=1)
    if isinstance(error, DecodeTooLateError):
        pool.metrics.expired["decode"].inc()
        return too_late()
    if isinstance(error, ImageError):
        return image_refusal(error)
    log.error("an image could not be decoded: %s", error)
    return internal_error()
