"""What one caller has under way, so that no caller takes everything.

    request begins ─► bytes arrive ─► images are admitted ─► (pixels are counted) ─► request ends

Owns: the counts of each caller (a key, or an address where there are no keys) and the refusals when one has enough.
Must not know queues: which image goes first is app.scheduling's business, who may come at all is app.access.access's.
"""

from __future__ import annotations

import math
import time
from types import TracebackType

from app.access.access import Caller
from app.errors import ServiceError
from app.pace import Pace


class Standing:
    """Of one caller, over all its requests."""

    __slots__ = ("bytes", "pace", "pixels", "requests")

    def __init__(self, images_per_s: float) -> None:
        self.requests = self.bytes = self.pixels = 0
        self.pace = Pace(images_per_s * 60, burst=max(1.0, images_per_s)) if images_per_s else None


class Shares:
    """Of all callers that have something under way, or a rate that is remembered."""

    def __init__(self) -> None:
        self._standings: dict[str, Standing] = {}

    def request(self, caller: Caller) -> Portion:
        """What a request of this caller holds; a context manager. Entering it raises QUEUE_FULL, FORBIDDEN."""
        return Portion(self, caller)

    def standing(self, caller: Caller) -> Standing:
        """Of a caller, made if need be."""
        standing = self._standings.get(caller.name)
        if standing is None:
            standing = self._standings[caller.name] = Standing(caller.limits.images_per_s)
        return standing

    def ended(self, caller: Caller) -> None:
        """Forget a caller that has nothing under way: addresses are the clients', and must not pile up."""
        standing = self._standings[caller.name]
        if standing.requests == 0 and (standing.pace is None or standing.pace.wait_s(time.monotonic(), math.inf) <= 0):
            del self._standings[caller.name]

    def __len__(self) -> int:
        return len(self._standings)


class Portion:
    """What one request holds of its caller's share, until its context ends."""

    __slots__ = ("_bytes", "_pixels", "_shares", "_standing", "caller")

    def __init__(self, shares: Shares, caller: Caller) -> None:
        self.caller = caller
        self._shares = shares
        self._bytes = self._pixels = 0

    def __enter__(self) -> Portion:
        standing = self._standing = self._shares.standing(self.caller)
        most = self.caller.limits.requests
        if most and standing.requests >= most:
            self._shares.ended(self.caller)
            raise _enough(f"{most} requests at a time")
        standing.requests += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        standing = self._standing
        standing.requests -= 1
        standing.bytes -= self._bytes
        standing.pixels -= self._pixels
        if standing.requests == 0:
            self._shares.ended(self.caller)

    def check_priority(self, priority: int) -> None:
        """Raises FORBIDDEN for more than the caller may have."""
        if priority > self.caller.limits.priority:
            message = f"a priority of {priority} is more than the {self.caller.limits.priority} that this key may have"
            raise ServiceError("FORBIDDEN", message)

    def hold_bytes(self, size: int) -> None:
        """So many bytes of the body are held. Raises QUEUE_FULL."""
        most = self.caller.limits.bytes
        if most and self._standing.bytes + size > most:
            raise _enough(f"{most} bytes of requests")
        self._standing.bytes += size
        self._bytes += size

    def admit_images(self, count: int) -> None:
        """So many images are to be computed. Raises QUEUE_FULL."""
        pace = self._standing.pace
        if pace is None:
            return
        wait_s = pace.wait_s(time.monotonic(), count)
        if wait_s > 0:
            raise _enough(f"{self.caller.limits.images_per_s:g} images a second", math.ceil(wait_s))
        pace.take(count)

    @property
    def counts_pixels(self) -> bool:
        """Whether the caller's pixels are limited: then an image's header is to be read before it is decoded."""
        return self.caller.limits.pixels > 0

    def hold_pixels(self, pixels: int) -> None:
        """An image of so many is to be decoded. Raises QUEUE_FULL."""
        most = self.caller.limits.pixels
        if most and self._standing.pixels + pixels > most:
            raise _enough(f"{most} pixels")
        self._standing.pixels += pixels
        self._pixels += pixels


def _enough(what: str, retry_after_s: int = 1) -> ServiceError:
    message = f"this client has all it may have, {what}; try again"
    return ServiceError("QUEUE_FULL", message, retry_after_s=retry_after_s)
