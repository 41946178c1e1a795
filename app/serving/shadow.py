"""Shadow versions: live images computed again by another version of their model, while the devices are idle.

    a batch of the model is done ─► its pixels copied ─► nothing waits and nothing computes ─► the other version
                                        └─ too old: dropped                                       ─► answers compared

Owns: the choice of images, and the differences of the answers, by class. Must not know a transport, nor delay a
request: a batch that has begun cannot be stopped, so one begins only after a moment of rest.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from app import clock
from app.fleet.fleet import Fleet
from app.fleet.submission import ModelPool, Submission
from app.link import Array, ClassDifference, Reply, Result, ShadowReport, Terms
from app.observability.metrics import Metrics
from app.scheduling.queue import ENDED, DeadlineUnreachableError, QueueFullError, Reservation
from models import Model, ModelError, Options, PixelModel

HELD = 16
"""Most images that wait for a moment of rest, each in a slot of its own."""
_LOOK_S = 0.02
_REST_LOOKS = 2
_OLDEST_S = 1.0
_DEADLINE_S = 10.0
_LAST = -100
"""Lowest priority."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Image in a slot of the other version, and the live version's answer."""

    item: Submission
    model: Model
    arrays: tuple[Array, ...]
    copied_s: float


def _ignored(_: Submission, __: Reply) -> None: ...


class Shadow:
    """Shadow of one model, `live`, by another version of it."""

    def __init__(self, fleet: Fleet, live: ModelPool, other: ModelPool, share: float, metrics: Metrics) -> None:
        """Mirror a share of the images. Raises ModelError if the answers of the two cannot be compared."""
        a, b = live.model, other.model
        comparable = isinstance(a, PixelModel) and isinstance(b, PixelModel) and a.accuracy is not None
        if not comparable or (a.task, a.input_shape) != (b.task, b.input_shape):
            raise ModelError(f"--shadow: {b.name} and {a.name} do not answer alike for the same input")
        self.report = ShadowReport(model=a.name, version=b.name)
        self._fleet, self._other, self._share = fleet, other, share
        self._images = {
            outcome: metrics.shadow_images.labels(b.name, outcome) for outcome in ("same", "different", "dropped")
        }
        self._held: deque[_Pair] = deque()
        self._resting = 0
        self._timer: asyncio.TimerHandle | None = None
        live.mirror = self._mirror

    def stop(self) -> None:
        """Drop the images that wait, and cancel the timer. Idempotent."""
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _mirror(self, items: Sequence[Submission], results: Sequence[tuple[Array, ...] | None]) -> None:
        """Copy a share of the images of a finished batch of the live version, while its slots still hold them."""
        for live, arrays in zip(items, results, strict=True):
            now_s = clock.monotonic()
            has_pixels = live.refill is None and live.status is not ENDED and arrays is not None
            if not has_pixels or len(self._held) >= HELD or random.random() >= self._share:
                continue
            assert arrays is not None
            slot, arena = self._other.slots.take(), self._fleet.arena
            arena.slot(self._other.index, slot)[:] = arena.slot(live.pool.index, live.slot)
            copied = Submission(live.reservation, 0, -1, self._other, slot, live.options, live.terms, _ignored, now_s)
            copied.placement = live.placement
            self._held.append(_Pair(copied, live.pool.model, arrays, now_s))
        if self._held and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Send one image after a moment of rest; drop images that are too old."""
        scheduler, now_s = self._fleet.scheduler, clock.monotonic()
        queues = scheduler.queues.values()
        busy = any(each.reserved or each.depth or each.in_flight for each in queues)
        self._resting = 0 if busy else self._resting + 1
        while self._held and now_s > self._held[0].copied_s + _OLDEST_S:
            self._give_up(self._held.popleft().item)
        if self._held and self._resting >= _REST_LOOKS and scheduler.serves(self._other.model.name):
            pair = self._held.popleft()
            item, name = pair.item, self._other.model.name
            item.terms = Terms(now_s + _DEADLINE_S, _LAST)
            item.reservation = Reservation(name, 1, _LAST, item.terms.deadline_s)
            try:
                scheduler.reserve(item.reservation, now_s)
            except (QueueFullError, DeadlineUnreachableError):
                self._give_up(item)
            else:
                item.ended = partial(self._ended, pair)
                self._fleet.dispatcher.enqueue(item, now_s)
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look) if self._held else None

    def _give_up(self, item: Submission) -> None:
        item.give_slot()
        self._count("dropped")

    def _count(self, outcome: str) -> None:
        self._images[outcome].inc()
        setattr(self.report, outcome, getattr(self.report, outcome) + 1)

    def _ended(self, pair: _Pair, item: Submission, reply: Reply) -> None:
        self._fleet.scheduler.release(item.reservation)
        if not isinstance(reply, Result) or reply.arrays is None:
            self._count("dropped")
            return
        comparing = asyncio.get_running_loop().run_in_executor(None, _compared, pair, reply, item.options)
        comparing.add_done_callback(self._compared)

    def _compared(self, comparing: asyncio.Future[dict[str, float]]) -> None:
        if comparing.cancelled() or comparing.exception() is not None:
            self._count("dropped")
            return
        by_class = comparing.result()
        self._count("different" if min(by_class.values(), default=1.0) < 1 else "same")
        for label, agreement in by_class.items():
            found = self.report.classes.setdefault(label, ClassDifference())
            found.images += 1
            found.different += agreement < 1


def _compared(pair: _Pair, reply: Result, options: Any) -> dict[str, float]:
    """Return the agreement of two answers, from 0 to 1, for each class that either has. Takes milliseconds."""
    live, other = pair.model, reply.model
    assert isinstance(live, PixelModel) and isinstance(other, PixelModel) and live.accuracy and reply.arrays  # noqa: PT018
    assert isinstance(options, Options)
    answers = [
        model.postprocess(arrays, reply.placement, options)
        for model, arrays in ((live, pair.arrays), (other, reply.arrays))
    ]
    measure = next(iter(live.accuracy.agreement(*[[each] for each in answers])))
    if "classes" in answers[0]:
        return {answers[0]["classes"][0]["label"]: live.accuracy.agreement(answers[:1], answers[1:])[measure]}
    labels = {each["label"] for answer in answers for each in answer["detections"]}
    return {
        label: live.accuracy.agreement(
            *[[{"detections": [each for each in answer["detections"] if each["label"] == label]}] for answer in answers]
        )[measure]
        for label in labels
    }
