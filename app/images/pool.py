"""The threads that decode, and everything else that would hold up the event loop.

Owns: how much work may wait, how much memory large images take at a time, and that they leave a thread free for small
ones. Must not know what the work is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

LARGE_PIXELS = 16_000_000
"""Images from this size on share all but one decode thread, so that they never hold up small ones. Above what phones
and cameras commonly send (12 million): of ordinary images every thread may take one."""

BYTES_PER_PIXEL = 16
"""The most that decoding takes: WebP, whose decoder, Pillow's image and our array are there together."""

_Result = TypeVar("_Result")


class DecodeQueueFullError(Exception):
    """As many images are being decoded, or wait for it, as may be."""


class DecodePool:
    """Threads that decode, owned by one event loop. Work is taken in order; large images leave one thread free."""

    def __init__(self, threads: int, limit: int) -> None:
        """At least two threads run, whatever `threads` says: one must stay free of large images.

        `limit`: images that may be decoded or wait for it, of which an eighth may be large ones. Large images take no
        more memory together than ordinary ones do when every thread decodes one: 256 MB a thread. One that takes more
        is decoded while no other large one is.
        """
        threads = max(2, threads)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._large = _LargeImages(threads - 1, threads * LARGE_PIXELS)
        self._limit = limit
        self._large_limit = max(1, limit // 8)
        self._here = 0
        self._large_here = 0

    @property
    def depth(self) -> int:
        """Images that are being decoded or wait for it."""
        return self._here

    async def decode(self, function: Callable[..., _Result], *args: Any, pixels: int) -> _Result:
        """As `run`, for a function that decodes so many pixels. Raises DecodeQueueFullError at once."""
        large = pixels >= LARGE_PIXELS
        if self._here >= self._limit or (large and self._large_here >= self._large_limit):
            kind = "large images" if self._here < self._limit else "images"
            here = self._large_here if self._here < self._limit else self._here
            raise DecodeQueueFullError(f"{here} {kind} are waiting to be decoded")
        self._here += 1
        self._large_here += large
        try:
            if not large:
                return await self.run(function, *args)
            async with self._large.decoding(pixels):
                return await self.run(function, *args)
        finally:
            self._here -= 1
            self._large_here -= large

    async def run(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Run `function` in a thread.

        When this ends, however it ends, no thread runs `function` and none will: what the caller lent it (a slot) is
        the caller's again. So work cancelled before it begins never begins, and work cancelled later is waited for.
        Raises RuntimeError once the pool is closed, and what `function` raises.
        """
        work = self._executor.submit(function, *args)
        try:
            await _ended(work)
        except asyncio.CancelledError:
            work.cancel()
            while not work.done():
                with suppress(asyncio.CancelledError):
                    await _ended(work)
            raise
        try:
            return work.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the decode pool was closed") from None

    async def close(self) -> None:
        """End the threads; work that has not begun is dropped, work that has is waited for."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)


class _LargeImages:
    """Admits large images in order, within a number of images and of pixels at a time."""

    def __init__(self, images: int, pixels: int) -> None:
        self._images, self._pixels = images, pixels
        self._under_way: list[int] = []  # Pixels of each.
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def decoding(self, pixels: int) -> AsyncIterator[None]:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((pixels, admitted))
        self._admit()
        try:
            await admitted
            yield
        finally:
            if admitted.done() and not admitted.cancelled():
                self._under_way.remove(pixels)
            else:
                self._waiting.remove((pixels, admitted))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            pixels, admitted = self._waiting[0]
            if admitted.cancelled():  # Its owner removes it.
                return
            self._waiting.popleft()
            self._under_way.append(pixels)
            admitted.set_result(None)

    def _fits(self, pixels: int) -> bool:
        within = len(self._under_way) < self._images and sum(self._under_way) + pixels <= self._pixels
        return within or not self._under_way


async def _ended(work: Future[Any]) -> None:
    """Wait for work to end; unlike asyncio.wrap_future, to be cancelled oneself says nothing to the work."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    def notify(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(wake)

    work.add_done_callback(notify)
    await ended
