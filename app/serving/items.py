"""The way of one item: an image, or a row of tensors.

    take a slot ─► fill it ─► submit ─► outcome ─► answer

Owns: this order, the slot until the dispatcher has it, and that all items of a request succeed or none. How a slot is
filled is app.serving.filling's, what is made of an outcome the caller's. Must not know images or tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from app.fleet.dispatcher import Dispatcher
from app.fleet.outcome import Outcome
from app.fleet.served_model import ModelPool
from app.scheduling.queue import Reservation
from app.serving.recorder import ItemRecorder
from app.serving.terms import Terms
from models import Options, Placement, TensorOptions

Fill = Callable[[int, int], Awaitable[Placement]]
"""Fills a slot, given its number and the item's position in the request. When it raises, the slot is its own to give
back, as soon as nobody writes to it any more: a decoder may still do so for a while.
"""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ComputedBy:
    """By which weights an item was computed, and on what."""

    weights: str
    device: str
    engine: str
    precision: str


def computed_by(served: ModelPool, outcome: Outcome) -> ComputedBy:
    """Who computed an outcome: the worker's own model, which after a hand-over may be another than the served one."""
    worker = outcome.worker
    assert worker.ready is not None
    loaded = worker.ready.loaded[served.index]
    assert loaded is not None
    weights = worker.model(served.index).weights
    return _computed_by(weights, worker.device, loaded.report.engine, loaded.report.precision)


_computed_by = lru_cache(maxsize=256)(ComputedBy)
"""Every image of a worker's has the same."""


@dataclass(slots=True)
class Items(Generic[Result]):
    """The items of one request that has its reservation.

    `answer`: what is made of an outcome and of what filling its slot has found; None: the outcome itself, whose answer
    the whole request makes.
    """

    dispatcher: Dispatcher
    served: ModelPool
    terms: Terms
    reservation: Reservation
    options: Options | TensorOptions
    answer: Callable[[Outcome, Placement], Awaitable[Result]]
    has_answers: bool = True

    async def run(self, fills: Sequence[Fill]) -> list[Result]:
        """All of them, at the same time, all or nothing. Raises ServiceError; cancelled, they leave their queue."""
        if len(fills) == 1:
            return [await self._run_one(fills[0], 0)]
        return await all_or_nothing([self._run_one(fill, position) for position, fill in enumerate(fills)])

    async def _run_one(self, fill: Fill, position: int) -> Result:
        terms = self.terms
        with terms.recorder.item(self.served, position, terms.deadline_s) as record:
            slot, placement = await self._filled(fill, position, record)
            item = self.dispatcher.submit(self.reservation, slot, self.options, position, terms.recorder.trace)
            record.queued(item)
            outcome = await self.dispatcher.outcome(self.served, item)
            record.computed(outcome)
            record.check_deadline()
            answer = await self.answer(outcome, placement)
            if self.has_answers:
                record.answered()
            return answer

    async def _filled(self, fill: Fill, position: int, record: ItemRecorder) -> tuple[int, Placement]:
        """A filled slot, and where the image lies in it. Raises ServiceError."""
        slot = self.served.slots.take()
        placement = await fill(slot, position)
        try:
            record.check_deadline()
        except BaseException:
            self.served.slots.give(slot)
            raise
        return slot, placement


async def all_or_nothing(answers: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Gather; the first failure cancels the rest and waits for them, so that nothing is left under way."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
