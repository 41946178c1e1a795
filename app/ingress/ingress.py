"""Order of the steps from any transport to an answer.

    find ─► admission ─► body, within the budget ─► what it asks ─► run, until the client leaves
    run: items (images, rows of tensors) over the link ─► one reply each ─► answer, all of a request's or none

Owns: these orders, the metrics of each item, and the parts that all transports share: the link to the owner, access,
and the budget of bodies. A transport brings a `Call`, which reads terms, body and request. Must not know what is asked.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, Generic, TypeVar, cast

import msgspec

from app import clock
from app.access.access import Access, ClientLease, ClientLimits
from app.config import Settings
from app.errors import ClientLeftError, ServiceError, of_image, shutting_down
from app.ingress.budget import Budget, Lease, Trim
from app.ingress.context import Interruption, RequestContext
from app.ingress.converter import Converter
from app.ingress.threads import Threads
from app.link import ComputedBy, Content, Link, Regions, Reply, Result, Room, ServedModel, Terms, too_late
from models import Options, TensorOptions

T = TypeVar("T")
C = TypeVar("C", bound=Content)
Token = tuple[int, asyncio.Future[Result]]


class Replies:
    """Items submitted over a link that have no reply yet."""

    def __init__(self, link: Link) -> None:
        self.link = link
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
        self.link.submit(room, tokens, content, options, position)
        return submitted

    def _replied(self, token: int, reply: Reply) -> None:
        future = self._futures.pop(token)
        if future.done():
            return
        if isinstance(reply, Result):
            future.set_result(reply)
        else:
            future.set_exception(reply)
            future.exception()  # The task that would hear it may have been cancelled before it began.


class Items(msgspec.Struct, Generic[T]):
    """Items of one request that has its room.

    `answer`: makes an item's own answer from its result; None if the results become one answer of the request.
    """

    replies: Replies
    room: Room
    options: Options | TensorOptions
    answer: Callable[[Result], Awaitable[T]] | None

    async def run(self, contents: list[C], numbers: Sequence[int] = ()) -> list[T]:
        """Compute all items concurrently, all or nothing. `numbers`: those of the contents' images, if the
        request has several. It empties `contents`: an image is not kept once its slot is filled.

        Raises ServiceError; cancelled, they leave their queue.
        """
        runs: list[Coroutine[Any, Any, T]] = []
        for place in range(len(contents)):
            for submitted in self.replies.submit(self.room, contents.pop(0), self.options, len(runs)):
                run = self._run_one(submitted, len(runs))
                runs.append(_named(numbers[place], run) if numbers else run)
        return [await runs[0]] if len(runs) == 1 else await all_or_nothing(runs)

    async def _run_one(self, submitted: Token, position: int) -> T:
        token, future = submitted
        try:
            result = await future
        except asyncio.CancelledError:
            self.replies.link.cancel(token)  # It leaves its queue at once.
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
        self.room.served.metrics.expired["postprocess"].inc()
        return too_late()


async def _named(number: int, run: Coroutine[Any, Any, T]) -> T:
    try:
        return await run
    except ServiceError as error:
        raise of_image(number, error) from None


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


Answer = TypeVar("Answer")

_FEW_CONNECTIONS = 8
_OFFLOAD_THREADS = 2


def connections(limit: int) -> Budget:
    """Return the budget of connections of all public ports together, HTTP's, TLS's and gRPC's.

    A connection is taken under `client_of` its address when it is accepted, before a handshake (QUEUE_FULL: it is
    closed at once), and given back when its descriptor is closed. A sixteenth is for addresses that have few: health
    checks and modest clients come through while others take what they can.
    """
    return Budget(limit, "connections", least=min(_FEW_CONNECTIONS, limit // 4), spare=limit // 16)


class Call(ABC, Generic[Answer]):
    """Request for a model, as a transport sees it."""

    context: RequestContext
    model: str
    version: str

    @abstractmethod
    def terms(self, settings: Settings) -> Terms:
        """Return the terms that precede the body. Raises INVALID_REQUEST."""

    @abstractmethod
    async def read(self, lease: Lease, limit: Interruption) -> None:
        """Receive the body within `limit`, and take its bytes from `lease`. Raises ServiceError, ClientLeftError."""

    @abstractmethod
    async def prepare(self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease) -> Run[Answer]:
        """Read the body, and return the function that computes the answer. Raises INVALID_REQUEST; may change terms."""

    @abstractmethod
    def watched(self, run: Run[Answer], on_leave: Callable[[], None]) -> Awaitable[Answer]:
        """Run, to be awaited at once. If the client leaves first, call `on_leave` and cancel the run."""


Run = Callable[[], Awaitable[Answer]]


class Ingress:
    """Ingress to the service behind one link. Made inside a running event loop."""

    def __init__(self, link: Link, access: Access, share: float = 1.0) -> None:
        """Make the shared parts. `share`: part of the bytes that requests may hold; the rest is for other ingresses."""
        self.link, self.access = link, access
        self.replies = Replies(link)
        self._threads = Threads(_OFFLOAD_THREADS)
        self.converter = Converter()
        self.bodies = Budget(int(share * link.settings.max_buffered_bytes), "bytes of requests and answers")
        """Bytes of requests until they are computed, and of large answers until their client has read them."""
        self._trim = Trim(self.bodies)
        self.limits = ClientLimits()
        self.connections = connections(link.settings.max_connections)
        self._under_way: set[Interruption] = set()

    def promised(self, headers: Sequence[tuple[bytes, bytes]], address: str, size: int) -> Callable[[], None] | None:
        """Promise a request the bytes of its body, which come later; return None if there will be no room for them.

        Else return a function that ends the promise.
        """
        try:
            client = self.access.admit("infer", "public", headers, address).name
        except ServiceError:  # It is refused before its body is read.
            return lambda: None
        return partial(self.bodies.fulfil, client, size) if self.bodies.promise(client, size) else None

    async def close(self) -> None:
        """End all that the ingress has started. Idempotent."""
        await self._trim.close()
        await self.converter.close()
        await self._threads.close()

    def made_by(self, computed_by: ComputedBy) -> dict[str, str | bool]:
        """Return an answer's origin: weights, device, engine, precision, and "simulated" for a simulated device."""
        weights, device, engine, precision = computed_by
        made_by: dict[str, str | bool]
        made_by = {"weights": weights, "device": device, "engine": engine, "precision": precision}
        if self.link.simulated:
            made_by["simulated"] = True
        return made_by

    def refuse_what_is_under_way(self) -> None:
        """Answer DRAINING to every call in flight: the service has waited long enough."""
        for each in list(self._under_way):
            each.interrupt(shutting_down())

    async def offload(self, function: Callable[..., T], *arguments: object) -> T:
        """Run `function` in a thread, and return its result. It must release the GIL, and be long for an event loop."""
        return await self._threads.run(function, *arguments)

    async def answer(self, call: Call[Answer]) -> Answer:
        """Answer a call. Raises ServiceError, ClientLeftError; cancelled, it gives everything back."""
        with Interruption(call.context.task, among=self._under_way) as ending:
            context, recorder = call.context, call.context.recorder
            served = context.choose(call.model, call.version)
            terms = call.terms(self.link.settings)
            terms.client, terms.check_priority = context.caller.name, context.caller.check_priority
            await self.link.check(served, terms)
            if terms.priority > 0:
                terms.check_priority(terms.priority)
            if context.caller.limits.any:
                terms.client_lease = ClientLease(self.limits, context.caller)
            with self.bodies.lease(context.caller.name, terms.client_lease) as lease:
                try:
                    with Interruption(ending.task, deadline_s=terms.deadline_s) as limit:
                        await call.read(lease, limit)
                        upload_s = clock.monotonic() - context.started_s
                        served.metrics.stage_seconds["upload"].observe(upload_s, recorder.exemplar)
                        run = await call.prepare(self, served, terms, lease)
                except (ServiceError, ClientLeftError) as error:
                    recorder.upload_failed(served.metrics, error)
                    raise
                return await call.watched(run, recorder.abandon)
