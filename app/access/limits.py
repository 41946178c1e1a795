"""Limits of each caller's requests in flight, so that no caller takes everything.

    request begins ─► bytes arrive ─► images are admitted ─► (pixels are counted) ─► request ends

Owns: the counts of each caller (a key, or an address without keys) and the refusals when one has enough. Must not know
queues: app.scheduling decides which image goes first, and app.access.access who may come at all.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from app import clock
from app.access.access import Caller
from app.errors import ServiceError
from app.pace import Pace


@dataclass(eq=False, slots=True)
class ClientUsage:
    """Counts of one caller's requests in flight; `pace`: of its images, if they have a rate."""

    pace: Pace | None
    requests: int = 0
    bytes: int = 0
    pixels: int = 0


class ClientLimits:
    """Limits of all callers that have something in flight, or a rate that is remembered."""

    def __init__(self) -> None:
        self._usages: dict[str, ClientUsage] = {}

    def request(self, caller: Caller) -> AbstractContextManager[ClientLease | None]:
        """Return the lease of a request; it gives None if nothing is limited. Entering it raises QUEUE_FULL."""
        return ClientLease(self, caller) if caller.limits.any else _UNLIMITED

    def usage(self, caller: Caller) -> ClientUsage:
        """Return the counts of a caller, made if need be."""
        usage = self._usages.get(caller.name)
        if usage is None:
            rate = caller.limits.images_per_s
            usage = ClientUsage(Pace(rate * 60, burst=max(1.0, rate)) if rate else None)
            self._usages[caller.name] = usage
        return usage

    def ended(self, caller: Caller) -> None:
        """Forget a caller that has nothing in flight: addresses are the clients', and must not pile up."""
        usage = self._usages[caller.name]
        if usage.requests == 0 and (usage.pace is None or usage.pace.wait_s(clock.monotonic(), math.inf) <= 0):
            del self._usages[caller.name]

    def __len__(self) -> int:
        return len(self._usages)


class ClientLease:
    """Share that one request holds of its caller's limits, until its context ends."""

    __slots__ = ("_bytes", "_limits", "_pixels", "_usage", "caller")

    def __init__(self, limits: ClientLimits, caller: Caller) -> None:
        self.caller = caller
        self._limits = limits
        self._bytes = self._pixels = 0

    def __enter__(self) -> ClientLease:
        usage = self._usage = self._limits.usage(self.caller)
        most = self.caller.limits.requests
        if most and usage.requests >= most:
            self._limits.ended(self.caller)
            raise _enough(f"{most} requests at a time")
        usage.requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        usage = self._usage
        usage.requests -= 1
        usage.bytes -= self._bytes
        usage.pixels -= self._pixels
        if usage.requests == 0:
            self._limits.ended(self.caller)

    def hold_bytes(self, size: int) -> None:
        """Hold so many more bytes of the body. Raises QUEUE_FULL."""
        most = self.caller.limits.bytes
        if most and self._usage.bytes + size > most:
            raise _enough(f"{most} bytes of requests")
        self._usage.bytes += size
        self._bytes += size

    def admit_images(self, count: int) -> None:
        """Admit so many images to be computed. Raises QUEUE_FULL."""
        pace = self._usage.pace
        if pace is None:
            return
        wait_s = pace.wait_s(clock.monotonic(), count)
        if wait_s > 0:
            raise _enough(f"{self.caller.limits.images_per_s:g} images a second", math.ceil(wait_s))
        pace.take(count)

    @property
    def counts_pixels(self) -> bool:
        """True if the caller's pixels are limited: then an image's header is to be read before it is decoded."""
        return self.caller.limits.pixels > 0

    def hold_pixels(self, pixels: int) -> None:
        """Hold the pixels of an image that is to be decoded. Raises QUEUE_FULL."""
        most = self.caller.limits.pixels
        if most and self._usage.pixels + pixels > most:
            raise _enough(f"{most} pixels")
        self._usage.pixels += pixels
        self._pixels += pixels


_UNLIMITED: AbstractContextManager[ClientLease | None] = nullcontext(None)


def _enough(what: str, retry_after_s: int = 1) -> ServiceError:
    message = f"this client has all it may have, {what}; try again"
    return ServiceError("QUEUE_FULL", message, retry_after_s=retry_after_s)
