"""Queue of images that wait to be decoded, in order, and the errors of decoding.

Owns: an image's record, one line a model, the seconds that images take and wait, the bounds on the queue and on large
images, and the turns between models and between clients. Pure logic: no processes, no asyncio, no clock. Must not know
what is in an image.

Models share the decoders by the seconds their images take, not by their number: each has a virtual clock, and the model
furthest behind goes first (start-time fair queueing, as in app.scheduling). Within a model the least rank goes first:
its client's turn, earlier by its priority. Clients share the decoders, too. An image's turn is its arrival, or later:
by the time that its client's earlier images would wait if all clients were served in turns. So an image of a client
that sends little goes before those of one that sends much, and no image overtakes another whose turn has passed. Large
images wait apart, so that they never stand before small ones when no decoder may take a large one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from app.decoder.messages import Kind
from app.scheduling.queue import NOTHING, Line, Turns
from models import Placement

Encoded = bytes | bytearray | memoryview

_MEAN_RATE = 0.05


class MeanOfLate:
    """Mean with more weight for recent values; a plain mean of the first ones."""

    __slots__ = ("_rate", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._rate = 1.0

    def learn(self, value: float) -> None:
        """Move the mean towards this."""
        self.value += self._rate * (value - self.value)
        self._rate = max(_MEAN_RATE, self._rate / (1 + self._rate))  # 1, 1/2, 1/3, …


class DecodeFailedError(Exception):
    """The image could not be decoded because of an internal fault; the message is for the log."""


class DecodeTooLateError(Exception):
    """The image was not decoded: its pixels would have come too late."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of decoding. `queue`: images that may wait or be decoded; `max_pixels`: of one image. Images from
    `large_pixels` on are large. They leave one decoder free, and together have no more pixels than one of that size for
    each decoder: 256 MB a decoder, at the 16 bytes a pixel that the hungriest format (WebP) takes in decoding.
    `timeout_s`: time after which a decoder that works on an image counts as hung.

    The default is above the common size of phones and cameras (12 million): every decoder may take one of those.
    """

    queue: int
    max_pixels: int
    large_pixels: int = 16_000_000
    timeout_s: float = 10.0


Outcome = Placement | Exception
"""Placement of an image's pixels in its slot, or the error."""


class PendingImage(msgspec.Struct, eq=False):
    """Image on its way through the decoders. The least `rank_s` goes first (`clock.monotonic()`); `turn_s` is its
    `client`'s part of it.

    Its slot belongs to the decoders until `ended` is called, exactly once: then no decoder can write to it any more.
    For REGIONS, `tail` lists them with their slots to fill (`messages.pack_regions`), and `width` is their number. For
    PIXELS (uint8 [height, width, 3]) `width` and `height` are the size. `needed_s`: pixels that come later are of no
    use.
    """

    model: int
    rank_s: float
    body: Encoded
    ended: Callable[[PendingImage, Outcome], None] = lambda _image, _outcome: None
    kind: Kind = Kind.ENCODED
    slot: int = 0
    width: int = 0
    height: int = 0
    tail: bytes = b""
    needed_s: float = math.inf
    items: Sequence[Any] = ()
    """The owner's items whose slots it fills."""
    client: str = ""
    turn_s: float = 0.0
    wanted: int = 1
    """Number of waiters."""
    pixels: int = 0
    large: bool = False
    """True if it may run only when a large one may."""
    queued: bool = False
    order: int = 0
    deaths: int = 0
    """Number of decoders that died with it; from the first on it is its decoder's only image."""
    sent_s: float = 0.0


class DecodeQueueFullError(Exception):
    """The decoders and their queue hold as many images as they may."""


class ModelLines:
    """Waiting images of one model, small and large ones apart, and the mean time of an image on a decoder."""

    def __init__(self) -> None:
        self.lines: tuple[Line[PendingImage], Line[PendingImage]] = Line(), Line()
        self.served_s = 0.0
        self.image_s = MeanOfLate()


class DecodeQueue:
    """Images before and with the decoders: their bounds, their order, and the time they take. Not thread-safe: one
    thread (the event loop) calls it.
    """

    def __init__(self, models: int, decoders: int, limits: ImageLimits) -> None:
        """Hold images of so many models for so many decoders; an eighth of `limits.queue` may be large."""
        self.limits = limits
        self._decoders = decoders
        self._models = [ModelLines() for _ in range(models)]
        self._order = count()
        self._turns = Turns()  # Of the images that wait.
        self._clock_s = 0.0
        self.waiting = 0
        """Number of images that no decoder has."""
        self.held = 0
        """Number of images waiting or with a decoder."""
        self._large: set[PendingImage] = set()
        """The large ones of these."""
        self.image_s, self.image_bytes = MeanOfLate(), MeanOfLate()
        self.seconds_an_image = 0.0
        """Recent seconds of all decoders together for an image."""

    def wait_s(self, model: int, priority_s: float, client: str, now_s: float, images: int = 1) -> float | None:
        """Return the seconds until a decoder should begin the last of `images` that a client may send now.

        None until it is known how long an image of the model takes.

        `priority_s`: the images rank so much earlier than now. The images with decoders, except one for each, are ahead
        in any case. If nothing waits, this is 0 for one image: its own decoding is not included.
        """
        image_s = self._models[model].image_s.value
        if not image_s:
            return None
        if not self.held:
            return (images - 1) * image_s / self._decoders
        in_hand_s = max(0, self.held - self.waiting - self._decoders) * self.image_s.value
        rank_s = self.turn_s(client, now_s) - priority_s
        return (in_hand_s + self._work_before_s(model, rank_s, images)) / self._decoders

    def is_hopeless(self, image: PendingImage, ahead: int, now_s: float) -> bool:
        """Return True if its pixels would come too late from a decoder that has so many images already."""
        return now_s + ahead * self.image_s.value + self._models[image.model].image_s.value > image.needed_s

    def add(self, image: PendingImage, client: str, now_s: float, *, again: bool = False) -> None:
        """Let an image in, behind others of its client; `end` must follow. Raises DecodeQueueFullError, except for an
        image that is here `again`: it was admitted.
        """
        if self.held >= self.limits.queue and not again:
            raise DecodeQueueFullError(f"{self.held} images are waiting to be decoded")
        if image.pixels >= self.limits.large_pixels:
            self.enlarge(image)
        self.held += 1
        image.client, image.turn_s = client, self.turn_s(client, now_s)
        image.rank_s += image.turn_s - now_s
        self.push(image)

    def end(self, image: PendingImage, outcome: Outcome) -> None:
        """End an image that does not wait, and that no decoder has any more."""
        self.held -= 1
        self._large.discard(image)
        image.ended(image, outcome)

    def enlarge(self, image: PendingImage) -> None:
        """Mark an image that does not wait as large. Raises DecodeQueueFullError if too many large ones are here."""
        if len(self._large) >= max(1, self.limits.queue // 8):
            raise DecodeQueueFullError(f"{len(self._large)} large images are waiting to be decoded")
        self._large.add(image)
        image.large = True

    def push(self, image: PendingImage) -> None:
        """Put an admitted image into the queue: for the first time, or again after its decoder was lost."""
        waiting = self._models[image.model]
        if not any(waiting.lines):
            waiting.served_s = max(waiting.served_s, self._clock_s)  # A model that was idle earns no credit.
        image.queued = True
        self.waiting += 1
        self._turns.begin(image.client, image.turn_s)
        image.order = next(self._order)
        insort(waiting.lines[image.large], (image.rank_s, image.order, image))

    def discard(self, image: PendingImage) -> bool:
        """Take a waiting image out; return False if it does not wait (any more)."""
        if not image.queued:
            return False
        image.queued = False
        self.waiting -= 1
        self._turns.end(image.client)
        line = self._models[image.model].lines[image.large]
        del line[bisect_left(line, (image.rank_s, image.order))]
        return True

    def pop(self) -> PendingImage | None:
        """Return the next image that may be decoded now, None without one."""
        best: tuple[float, PendingImage] | None = None
        for waiting in self._models:
            small, large = waiting.lines
            first = small[0][2] if small else None
            if large and (first is None or large[0][0] < first.rank_s) and self._has_room(large[0][2]):
                first = large[0][2]
            if first is not None and (best is None or waiting.served_s < best[0]):
                best = waiting.served_s, first
        if best is None:
            return None
        self._clock_s = max(self._clock_s, best[0])
        image = best[1]
        self.discard(image)
        return image

    def _has_room(self, image: PendingImage) -> bool:
        """Return True if a large image may be decoded now: one decoder stays free of them, and their memory is bounded.
        One above the bound is decoded while no other large one is.
        """
        decoded = [each.pixels for each in self._large if not each.queued]
        within = sum(decoded) + image.pixels <= self._decoders * self.limits.large_pixels
        return not decoded or (len(decoded) < self._decoders - 1 and within)

    def took(self, image: PendingImage, seconds: float) -> None:
        """Learn the decoding time of an image."""
        waiting = self._models[image.model]
        waiting.served_s += seconds
        waiting.image_s.learn(seconds)
        self.image_s.learn(seconds)
        self.image_bytes.learn(len(image.body))
        self.seconds_an_image = self.image_s.value / self._decoders

    def turn_s(self, client: str, now_s: float) -> float:
        """Return the turn of an image that comes now, if all clients that wait were served in turns.

        Never later than the time of all that waits.
        """
        own, last_s = self._turns.get(client, NOTHING)
        ahead = min(own * len(self._turns), self.waiting)
        return max(now_s + ahead * self.seconds_an_image, last_s) if own else now_s

    def _work_before_s(self, model: int, rank_s: float, images: int) -> float:
        """Return the seconds of work ahead of the last of `images` more, the first of which has this rank.

        Large images are left out: they wait for each other, and small ones do not wait for them.
        """
        own = self._models[model]
        own_s = (own.lines[False].before(rank_s) + images - 1) * own.image_s.value
        if len(own.lines[False]) == self.waiting:
            return own_s
        work_s = own_s
        for other in self._models:
            if other is not own and (line := other.lines[False]):
                # Models take turns: of another one no more goes before it than of its own, and one image.
                other_s = other.image_s.value
                work_s += min(len(line) * other_s, own_s + other_s)
        return work_s
