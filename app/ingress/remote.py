"""Ingress's end of the link to an owner in another process (app.link_messages).

Owns: items that were sent and have no reply yet, and their memory. Must not know a transport, nor the life of its
process (app.ingress_main).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

from app import clock, logs
from app.errors import ServiceError
from app.link import ComputedBy, Content, Link, Reply, Result, Room, ServedModel, Tables, Terms, too_late
from app.link_messages import (
    Ask,
    Asked,
    At,
    Cancel,
    ItemComputed,
    ItemFailed,
    Leave,
    NewModels,
    Reserve,
    Serves,
    Submit,
    ToIngress,
    Uncongested,
    placed,
)
from app.observability.metrics import Recorder
from app.processes.arena import Blocks, open_blocks
from app.processes.channel import Talk
from app.processes.packing import read_packed
from models import Model, Options, TensorOptions

_UNCONGESTED_S = 1.0
"""Time left with which a request may come without a question if the model is uncongested."""
_SENT_EVERY_S = 0.1


class RemoteLink(Link):
    """Link to the owner, made after IngressBegin. `on_counted`: called periodically after requests have ended."""

    def __init__(self, tables: Tables, forms: Sequence[ServedModel], talk: Talk, blocks: Blocks) -> None:
        """Make the link. `forms`: all served models by index, also those that others hold as `floats`."""
        super().__init__(tables)
        self._forms, self._talk, self._blocks = forms, talk, blocks
        self._loop = asyncio.get_running_loop()
        self._models: dict[int, Model] = {form.index: form.model for form in forms}
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._under_way: dict[int, tuple[_RemoteRoom, bool]] = {}
        """Items by token; True if the reply was already given here."""
        self._uncongested: tuple[int, ...] = ()
        self._telling: asyncio.TimerHandle | None = None
        self.on_counted: Callable[[], None] = lambda: None

    def count(self, served: ServedModel, code: str, seconds: float, recorder: Recorder) -> None:  # noqa: D102
        super().count(served, code, seconds, recorder)
        if self._telling is None:
            self._telling = self._loop.call_later(_SENT_EVERY_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        self.on_counted()

    async def check(self, served: ServedModel, terms: Terms) -> None:  # noqa: D102
        left_s = terms.deadline_s - clock.monotonic()
        if served.index in self._uncongested and left_s > _UNCONGESTED_S:
            return
        token, answer = next(self._numbers), self._loop.create_future()
        self._asked[token] = answer
        self._talk.say(Ask(token, served.index, terms.deadline_s, terms.priority, terms.client))
        try:
            await asyncio.wait_for(answer, max(0.0, left_s))
        except asyncio.TimeoutError:
            raise too_late() from None
        finally:
            self._asked.pop(token, None)

    def reserve(self, served: ServedModel, count: int, terms: Terms) -> Room:  # noqa: D102
        if clock.monotonic() >= terms.deadline_s:
            served.metrics.expired["upload"].inc(count)
            raise ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the request had arrived")
        room = _RemoteRoom(served, terms, next(self._numbers), self._talk, self._blocks)
        self._talk.say(
            Reserve(
                room.number,
                served.index,
                count,
                terms.deadline_s,
                terms.priority,
                terms.client,
                logs.request_id.get(),
            )
        )
        return room

    def submit(  # noqa: D102
        self, room: Room, tokens: Sequence[int], content: Content, options: Options | TensorOptions, position: int
    ) -> None:
        assert isinstance(room, _RemoteRoom)
        try:
            at = room.placed(content)
        except MemoryError:
            room.served.metrics.rejected["buffer_full"].inc()
            for token in tokens:
                self._on_reply(token, ServiceError("QUEUE_FULL", "too much is under way; try again", retry_after_s=1))
            return
        for token in tokens:
            self._under_way[token] = room, False
        room.missing += len(tokens)
        kinds = (options, None) if isinstance(options, Options) else (None, options)
        self._talk.say(Submit(room.number, tuple(tokens), position, at, *kinds))

    def cancel(self, token: int) -> None:  # noqa: D102
        room, silent = self._under_way.get(token, (None, True))
        if room is not None and not silent:
            self._under_way[token] = room, True
            self._talk.say(Cancel(room.number, token, room.terms.recorder.abandoned))
            self._on_reply(token, ServiceError("INTERNAL", "the request was cancelled"))

    def received(self, message: ToIngress) -> None:
        """Handle a message of the owner; ignore those that are not for the link."""
        match message:
            case ItemComputed():
                self._reply(message.token, self._result(message))
            case ItemFailed():
                self._reply(message.token, message.refusal.error())
            case Asked():
                answer = self._asked.get(message.token)
                if answer is not None and not answer.done():
                    if message.refusal is None:
                        answer.set_result(None)
                    else:
                        answer.set_exception(message.refusal.error())
            case Uncongested():
                self._uncongested = message.forms
            case NewModels():
                objects = read_packed(self._talk.take_descriptor())
                for number, model in zip(message.numbers.values(), objects, strict=True):
                    self._models[number] = model
                    self._models.pop(number - 2 * len(self._forms), None)  # Results of the one before may still come.
            case Serves():
                for index, number in message.numbers.items():
                    self._forms[index].model = self._models[number]

    def _reply(self, token: int, reply: Reply) -> None:
        room, silent = self._under_way.pop(token)
        room.missing -= 1
        room.rest()
        if not silent:
            self._on_reply(token, reply)

    def _result(self, message: ItemComputed) -> Result:
        arrays = None
        if message.arrays is not None:
            data: Any = message.data
            sizes = [(np.dtype(kind), math.prod(shape), shape) for kind, shape in message.arrays]
            if sum([dtype.itemsize * size for dtype, size, _ in sizes]) > len(data):
                data = open_blocks(self._talk.take_descriptor())
            arrays, at = [], 0
            for dtype, size, shape in sizes:
                arrays.append(np.frombuffer(data, dtype, size, at).reshape(shape) if size else np.empty(shape, dtype))
                at += dtype.itemsize * size
        batch = None
        if message.batch is not None:
            from opentelemetry.trace import SpanContext, TraceFlags

            trace, span, flags = message.batch
            batch = SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(flags))
        return Result(
            None if arrays is None else tuple(arrays),
            self._models[message.model],
            ComputedBy(*message.computed_by),
            message.placement,
            message.begun_s,
            message.queued_s,
            message.infer_s,
            batch,
        )


class _RemoteRoom(Room):
    """Room at the owner. `missing`: number of its tokens without a reply from the owner."""

    def __init__(self, served: ServedModel, terms: Terms, number: int, talk: Talk, blocks: Blocks) -> None:
        self.served, self.terms = served, terms
        self.number, self.missing = number, 0
        self._talk, self._blocks, self._left = talk, blocks, False
        self._written: list[tuple[int, int]] = []
        self._placed: tuple[Content, At] | None = None

    def placed(self, content: Content) -> At:
        """Return where the content lies for the owner; the rows of a request share one copy. Raises MemoryError."""
        before = self._placed
        if before is not None and getattr(before[0], "inputs", before) is getattr(content, "inputs", None):
            return before[1]
        at = placed(content, self._write)
        self._placed = content, at
        return at

    def _write(self, data: memoryview) -> int:
        start = self._blocks.write(data)
        self._written.append((start, len(data)))
        return start

    def __exit__(self, *_: object) -> None:
        self._left = True
        self._talk.say(Leave(self.number))
        self.rest()

    def rest(self) -> None:
        if self._left and not self.missing:
            for start, size in self._written:
                self._blocks.give(start, size)
            self._written.clear()
            self._placed = None
