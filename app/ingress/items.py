"""Items of a request: images, or rows of tensors.

    submit over the link ─► its one reply ─► answer, all of a request's or none

Owns: this order, and the metrics of each item. The owner fills slots; the caller makes answers from results. Must not
know images or tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Generic, TypeVar, cast

from app import clock
from app.errors import ServiceError
from app.link import Content, Link, Regions, Reply, Result, Room, too_late
from models import Options, TensorOptions

T = TypeVar("T")
Token = tuple[int, asyncio.Future[Result]]


class Replies:
    """Items submitted over a link that have no reply yet."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._tokens = count()
        self._futures: dict[int, asyncio.Future[Result]] = {}
        self._loop = asyncio.get_running_loop()
        link.connect(self._replied)

    def submit(self, room: Room, content: Content, options: Options | TensorOptions, position: int) -> list[Token]:
        """Submit items; return tokens with futures, all to be awaited. Each gets a result, or a ServiceError."""
        items = len(content.regions) if isinstance(content, Regions) else 1
        tokens, submitted = [], []
        for token in islice(self._tokens, items):
            future = self._futures[token] = self._loop.create_future()
            tokens.append(token)
            submitted.append((token, future))
        self._link.submit(room, tokens, content, options, position)
        return submitted

    def cancel(self, token: int) -> None:
        """Cancel an item that is not wanted any more: it leaves its queue at once."""
        self._link.cancel(token)

    def _replied(self, token: int, reply: Reply) -> None:
        future = self._futures.pop(token)
        if future.done():
            return
        if isinstance(reply, Result):
            future.set_result(reply)
        else:
            future.set_exception(reply)
            future.exception()  # The task that would hear it may have been cancelled before it began.


@dataclass(slots=True)
class Items(Generic[T]):
    """Items of one request that has its room.

    `answer`: makes an item's own answer from its result; None if the results become one answer of the request.
    """

    replies: Replies
    room: Room
    options: Options | TensorOptions
    answer: Callable[[Result], Awaitable[T]] | None

    async def run(self, contents: Sequence[Content]) -> list[T]:
        """Compute all items concurrently, all or nothing. Raises ServiceError; cancelled, they leave their queue."""
        submitted: list[Token] = []
        for content in contents:
            submitted += self.replies.submit(self.room, content, self.options, len(submitted))
        if len(submitted) == 1:
            return [await self._run_one(submitted[0], 0)]
        return await all_or_nothing([self._run_one(each, position) for position, each in enumerate(submitted)])

    async def _run_one(self, submitted: Token, position: int) -> T:
        token, future = submitted
        try:
            result = await future
        except asyncio.CancelledError:
            self.replies.cancel(token)
            raise
        served, terms = self.room.served, self.room.terms
        recorder = terms.recorder
        computed_s = clock.monotonic()
        is_answered = False
        try:
            if computed_s >= terms.deadline_s:
                raise self._too_late()
            if self.answer is None:
                answer = cast(T, result)
            else:
                answer = await self.answer(result)
                if clock.monotonic() >= terms.deadline_s:
                    raise self._too_late()
            is_answered = True
        except asyncio.CancelledError:
            if recorder.abandoned:
                served.metrics.cancelled["postprocess"].inc()
            raise
        finally:
            now_s = clock.monotonic()
            # The time that the device did not take was a wait, in the queue or in front of the worker.
            infer_s = max(result.queued_s, computed_s - result.infer_s)
            if recorder.trace is not None:
                begun = [("decode", result.begun_s), ("queue", result.queued_s), ("infer", infer_s)]
                # An item without an answer of its own (a row of tensors) ends with the device.
                if self.answer is not None or not is_answered:
                    begun.append(("post", computed_s))
                recorder.trace.stages(begun, now_s, position, result.batch)
        seconds = {
            "decode": result.queued_s - result.begun_s,
            "queue": infer_s - result.queued_s,
            "infer": result.infer_s,
        }
        if self.answer is not None:
            seconds["postprocess"] = now_s - computed_s
        recorder.image(served.metrics, served.statistics, seconds, terms.deadline_s - now_s)
        return answer

    def _too_late(self) -> ServiceError:
        """Count an item whose deadline has passed, and make its error."""
        self.room.served.metrics.expired["postprocess"].inc()
        return too_late()


async def all_or_nothing(answers: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Gather; the first failure cancels the rest and waits for them, so that nothing is left in flight."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
