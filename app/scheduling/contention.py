"""What is different while several clients ask: the next image of each shall wait behind as few batches as it can.

Owns: whether several clients ask at present, and how early the next batch goes to a worker that computes one. Pure
logic; times are in seconds, the clock is a parameter. Must not know queues or batches.

An image that comes while a worker computes waits for the rest of that batch, for the one in front of the worker, where
it was sent already, and for its own. Only the second of these can be spared: what has begun cannot be stopped. So the
next batch is sent late, with what has come until then, and yet so early that the worker never waits for it.
"""

from __future__ import annotations

import math

_REMEMBERED_S = 1.0
"""Clients share for so long after two of them have asked within such a time."""
_EARLY_S = 0.004
"""What the event loop and the socket may take, and an estimate of a batch may be wrong by."""
_EARLY_SHARE = 0.15
"""And of a batch's time: a worker that begins a batch before the one before is done looks for it that early."""
_PREPARATIONS = 2.0
RATE_KEPT = 0.97
"""Share of the most images a second that a worker still answers with the shorter batches of this time."""


class Sharing:
    """Whether several clients have asked of late."""

    __slots__ = ("_client", "_seen_s", "_until_s")

    def __init__(self) -> None:
        self._client, self._seen_s = "", -math.inf
        self._until_s = -math.inf

    def asked(self, client: str, now: float) -> None:
        """A client asks; "" where it is not known which."""
        if client != self._client:
            if now < self._seen_s + _REMEMBERED_S:
                self._until_s = now + _REMEMBERED_S
            self._client = client
        self._seen_s = now

    def at(self, now: float) -> bool:
        """Whether they do now."""
        return now < self._until_s


def early_s(batch_s: float, prepare_s: float) -> float:
    """How long before a batch of `batch_s` is done the next one is sent; `prepare_s`: what that takes beside it."""
    return _EARLY_S + _EARLY_SHARE * batch_s + _PREPARATIONS * prepare_s
