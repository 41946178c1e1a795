"""Images to decoders and their pixels into the arena: what is sent where, and what becomes of it.

    decode ─► wait (heap) ─► a decoder with a credit ─► answer ─► Placement
                 ▲                 ├─ too many pixels for now: waits again, among the large ones
                 └──── alone ◄─────┴─ it died or hung: its image is rejected, the others it had are tried again

Owns: the decoders, their credits, and every image until somebody has its outcome. Must not know requests or bodies'
forms. All of it runs in the event loop's thread; nothing in it costs more than a copy of an image's bytes.

The slot of an image belongs to this pool until its pixels are there: whenever `decode` raises, the pool gives the slot
back itself, as soon as no decoder can write to it any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable

from app.decoder.messages import Decoded, DecodePlan, Job, Kind, Status, pack_job
from app.decoding.image import DecodeExpiredError, DecodeFailedError, Encoded, ImageLimits, PendingImage
from app.decoding.process import DecoderProcess
from app.decoding.replicas import Loss, Replicas
from app.decoding.waiting import ClientTurns, DecodeQueue, DecodeQueueFullError, Entry
from app.images.header import ImageTooLargeError, InvalidImageError
from app.processes.arena import Arena
from models import Placement

log = logging.getLogger("anychip.decoders")

CREDITS = 8
"""Images with a decoder at most."""
_LEAST_CREDITS = 2
"""One that it works on, one in front of it."""
_AHEAD_S = 0.008
"""A decoder has as many images as it is expected to decode in this time, by their bytes, within these bounds. It
answers several small ones at once: to be woken up for each costs this process more than what it then does for one.
"""
_MOST_DEATHS = 3
"""Decoders that may be killed from outside under one image, before the image is taken for the cause: the system's
out-of-memory killer comes from outside, too."""
_MEAN_RATE = 0.05
_CREDIBLE, _ALWAYS_CREDIBLE_S = 3.0, 0.25
"""So many times the mean, or so long, an image may take. In the rest of it something stood still (a paused container, a
stopped process), and that is held against no model."""
_ALWAYS = (1 << 64) - 1


class Decoders:
    """Made, started and stopped inside one running event loop."""

    def __init__(
        self,
        plan: DecodePlan,
        arena: Arena,
        count: int,
        limits: ImageLimits,
        *,
        restarted: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`count`: processes; at least two run, as one must stay free of large images. `restarted`: hears "died" or
        "hung" for each decoder that is replaced.
        """
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._most_credits = min(CREDITS, plan.buffers)
        self._restarted = restarted
        self._replicas = Replicas(
            max(2, count),
            plan,
            arena,
            lambda: self._limits.timeout_s,
            answered=self._answered,
            lost=self._lost,
            ready=self._flush_soon,
        )
        self._queue: DecodeQueue[PendingImage] = DecodeQueue(len(plan.models), limits.queue)
        self._turns = ClientTurns()
        self._tokens = 0
        self._large = 0  # Large images with decoders, and their pixels.
        self._large_pixels = 0
        self._image_s = self._image_bytes = 0.0  # Of an image, the mean of late.
        self._flushing = False
        self._rejecting: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Images that no decoder has yet."""
        return self._queue.waiting

    @property
    def held(self) -> int:
        """Images that are being decoded or wait for it."""
        return self._queue.held

    @property
    def seconds_an_image(self) -> float:
        """What an image takes of all decoders together, of late."""
        return self._image_s / self._replicas.count

    @property
    def up(self) -> int:
        """Decoders that are ready."""
        return len(self._replicas.ready)

    @property
    def pids(self) -> list[int]:
        """Of the decoders that are ready."""
        return [decoder.pid for decoder in self._replicas.decoders.values() if decoder.pid]

    async def start(self) -> None:
        """Returns when every decoder is ready. Raises DecoderStartError."""
        await self._replicas.start()

    async def stop(self) -> None:
        """End every process; what is still under way fails. Idempotent."""
        left = await self._replicas.stop()
        await asyncio.gather(*self._rejecting)
        while (waiting := self._queue.pop()) is not None:
            left.append(waiting)
        for entry in left:
            self._fail(entry, DecodeFailedError("the service stops"))

    async def decode(
        self,
        model: int,
        slot: int,
        body: Encoded,
        *,
        give: Callable[[int], None],
        deadline_s: float,
        rank_s: float,
        client: str = "",
        size: tuple[int, int] | None = None,
        tail: bytes = b"",
        count: int = 0,
        passed: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Placement:
        """Decode an image into a slot of the arena. Times are in `time.monotonic()`.

        `count`: of regions that `tail` names with their slots (`messages.pack_regions`); these are filled, and not
        `slot`. `give`: frees the slot, called when this raises and nobody writes to the slot any more. `rank_s`: the
        least is decoded first; images of one `client` stand behind each other. `size`: width and height, where `body`
        is uint8 [height, width, 3] and only to be placed. `passed`: where the file itself may be put into the slot, for
        a device to decode, is called when it was. `again`: it was passed before, and no limit on what waits counts.
        Cancelled, the image leaves the heap at once.
        Raises DecodeQueueFullError, DecodeExpiredError, InvalidImageError, ImageTooLargeError, DecodeFailedError.
        """
        kind = Kind.REGIONS if count else Kind.PIXELS if size else Kind.FILE if passed else Kind.ENCODED
        width, height = size or (count, 0)
        future: asyncio.Future[Placement] = self._loop.create_future()
        image = PendingImage(kind, body, slot, width, height, deadline_s, give, future, tail, passed, width * height)
        entry = Entry(model, image, rank_s)
        try:
            self._queue.admit(again=again)
        except DecodeQueueFullError:
            give(slot)
            raise
        if image.pixels >= self._limits.large_pixels:
            try:
                self._queue.enlarge(entry)
            except DecodeQueueFullError:
                self._queue.leave(entry)
                give(slot)
                raise
        now_s = time.monotonic()
        entry.rank_s += self._turns.behind_s(client, now_s, self.seconds_an_image, self._queue.waiting)
        self._queue.push(entry)
        self._flush_soon()
        timer = self._loop.call_later(max(0.0, deadline_s - now_s), self._expire, entry)
        try:
            return await image.future
        except asyncio.CancelledError:
            self._abandon(entry)
            raise
        finally:
            timer.cancel()

    def _expire(self, entry: Entry[PendingImage]) -> None:
        """The deadline has passed: the client hears it now, also where a decoder has the image."""
        image = entry.payload
        if image.future.done():
            return
        if self._queue.discard(entry):
            self._fail(entry, DecodeExpiredError())
        else:
            image.abandoned = True
            image.future.set_exception(DecodeExpiredError())

    def _abandon(self, entry: Entry[PendingImage]) -> None:
        """Nobody waits for the image any more."""
        image = entry.payload
        if self._queue.discard(entry):
            self._leave(entry)
        elif image.future.done() and not image.future.cancelled() and image.future.exception() is None:
            image.give(image.slot)  # It was decoded, and the one who asked was cancelled before hearing so.
        else:
            image.abandoned = True

    def _leave(self, entry: Entry[PendingImage]) -> None:
        """Out of this pool, its slot free."""
        self._queue.leave(entry)
        entry.payload.give(entry.payload.slot)

    def _fail(self, entry: Entry[PendingImage], error: Exception) -> None:
        """No decoder has the image, and none will."""
        self._leave(entry)
        if not entry.payload.future.done():
            entry.payload.future.set_exception(error)

    def _flush_soon(self) -> None:
        """Send what can be sent, once a turn of the loop: what comes in one turn goes in one packet."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        now_s = time.monotonic()
        while self._queue.waiting:
            decoder = self._next_decoder()
            if decoder is None:
                break
            entry = self._queue.pop(self._has_room)
            if entry is None:
                break
            if entry.payload.deaths and decoder.sent:
                # It wants a decoder of its own; there is one as soon as one has nothing left.
                idle = next((each for each in self._replicas.ready if not each.sent), None)
                if idle is None:
                    self._queue.push(entry)
                    break
                decoder = idle
            self._give_to(decoder, entry, now_s)
        for decoder in self._replicas.decoders.values():
            decoder.flush()

    def _has_room(self, image: PendingImage) -> bool:
        """Whether a large image may be decoded now: one decoder stays free of them, and their memory is bounded. One
        that takes more than the bound is decoded while no other large one is.
        """
        count = self._replicas.count
        within = self._large_pixels + image.pixels <= count * self._limits.large_pixels
        return not self._large or (self._large < count - 1 and within)

    def _next_decoder(self) -> DecoderProcess | None:
        """The decoder with the fewest bytes ahead of it among those that may have another image."""
        best = None
        ahead_bytes = self._image_bytes * _AHEAD_S / self._image_s if self._image_s else 0.0
        for decoder in self._replicas.ready:
            if not decoder.is_reserved and (best is None or decoder.bytes < best.bytes):
                images = len(decoder.sent)
                if images < _LEAST_CREDITS or (images < self._most_credits and decoder.bytes < ahead_bytes):
                    best = decoder
        return best

    def _give_to(self, decoder: DecoderProcess, entry: Entry[PendingImage], now_s: float) -> None:
        image = entry.payload
        buffer = decoder.free_buffers.pop()
        decoder.inbox.write(buffer, image.body, image.tail)
        self._tokens = token = (self._tokens + 1) % (1 << 31)
        if not decoder.sent:
            decoder.heard_s = now_s
        decoder.add(token, entry, buffer)
        image.sent_s = now_s
        if entry.large:
            self._large += 1
            self._large_pixels += image.pixels
        large_pixels = _ALWAYS if entry.large else self._limits.large_pixels
        job = Job(
            token=token,
            kind=image.kind,
            buffer=buffer,
            model=entry.model,
            slot=image.slot,
            size=len(image.body) + len(image.tail),
            max_pixels=self._limits.max_pixels,
            large_pixels=large_pixels,
            width=image.width,
            height=image.height,
        )
        decoder.out += pack_job(job)

    def _answered(self, decoder: DecoderProcess, answer: Decoded) -> None:
        """Raises KeyError for a job that this decoder does not have."""
        entry = decoder.answered(answer.token)
        now_s = time.monotonic()
        image = entry.payload
        credible_s = max(_CREDIBLE * self._image_s, _ALWAYS_CREDIBLE_S)
        taken_s = min(now_s - max(image.sent_s, decoder.heard_s), credible_s)
        self._image_s += _MEAN_RATE * (taken_s - self._image_s)
        self._image_bytes += _MEAN_RATE * (len(image.body) - self._image_bytes)
        self._queue.took(entry.model, taken_s)
        decoder.heard_s = now_s
        self._returned(entry)
        self._outcome(entry, answer)
        if self._queue.waiting:
            self._flush_soon()

    def _returned(self, entry: Entry[PendingImage]) -> None:
        """A decoder has the image no longer."""
        if entry.large:
            self._large -= 1
            self._large_pixels -= entry.payload.pixels

    def _outcome(self, entry: Entry[PendingImage], answer: Decoded) -> None:
        image = entry.payload
        if image.abandoned or image.future.done():
            self._leave(entry)
        elif answer.status == Status.PLACED or (answer.status == Status.PASSED and image.passed is not None):
            self._queue.leave(entry)
            if answer.status == Status.PASSED and image.passed is not None:
                image.passed()
            where = answer.scale, answer.pad_x, answer.pad_y
            image.future.set_result(Placement(answer.width, answer.height, *where))
        elif answer.status == Status.LARGE:
            image.pixels = answer.width * answer.height
            try:
                self._queue.enlarge(entry)
            except DecodeQueueFullError as error:
                self._fail(entry, error)
            else:
                self._queue.push(entry)
        elif answer.status == Status.TOO_LARGE:
            self._fail(entry, ImageTooLargeError(answer.text))
        elif answer.status == Status.INVALID:
            self._fail(entry, InvalidImageError(answer.text))
        else:
            self._fail(entry, DecodeFailedError(answer.text))

    def _lost(self, loss: Loss) -> None:
        """Reject the image that ended its decoder; the others that it had are tried again."""
        self._restarted("hung" if loss.hung else "died")
        for entry in loss.entries:
            self._returned(entry)
            image = entry.payload
            image.deaths += 1
            if image.abandoned or image.future.done():
                self._leave(entry)
            elif entry is loss.culprit or image.deaths > _MOST_DEATHS:
                rejecting = asyncio.create_task(self._reject(entry, hung=loss.hung), name="rejection of an image")
                self._rejecting.add(rejecting)
                rejecting.add_done_callback(self._rejecting.discard)
            else:
                self._queue.push(entry)
        self._flush_soon()

    async def _reject(self, entry: Entry[PendingImage], *, hung: bool) -> None:
        body = entry.payload.body
        digest = await asyncio.to_thread(lambda: hashlib.sha256(body).hexdigest())
        what, sentence = ("hung", "takes too long to decode") if hung else ("died", "could not be decoded")
        log.error("a decoder %s at an image of %d bytes, sha256 %s", what, len(body), digest)
        self._fail(entry, InvalidImageError(f"the image {sentence}"))
