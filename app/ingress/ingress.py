"""Order of the steps from any transport to an answer.

    find ─► admission ─► body, within the budget ─► what it asks ─► run, until the client leaves

Owns: this order, and the parts that all transports share: the link to the owner, access, and the budget of bodies. A
transport brings a `Call`, which reads terms, body and request. Must not know what is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from app import clock
from app.access.access import Access
from app.access.limits import ClientLimits
from app.config import Settings
from app.errors import ClientLeftError, ServiceError
from app.ingress.budget import Budget, Lease
from app.ingress.context import RequestContext
from app.ingress.converter import Converter
from app.ingress.interrupt import Interruption, interrupted_at
from app.ingress.items import Replies
from app.ingress.threads import Threads
from app.ingress.trim import Trim
from app.link import ComputedBy, Link, ServedModel, Terms

Answer = TypeVar("Answer")
T = TypeVar("T")

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

    def __init__(self, context: RequestContext, model: str, version: str = "") -> None:
        self.context, self.model, self.version = context, model, version

    @abstractmethod
    def terms(self, settings: Settings) -> Terms:
        """Return the terms that precede the body. Raises INVALID_REQUEST."""

    @abstractmethod
    async def read(self, lease: Lease, limit: interrupted_at) -> None:
        """Receive the body within `limit`, and take its bytes from `lease`. Raises ServiceError, ClientLeftError."""

    @abstractmethod
    async def prepare(self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Lease) -> Run[Answer]:
        """Read the body, and return the function that computes the answer. Raises INVALID_REQUEST; may change the
        terms.
        """

    @abstractmethod
    async def watched(self, running: Awaitable[Answer], on_leave: Callable[[], None]) -> Answer:
        """Return the answer. If the client leaves first, call `on_leave` and cancel `running`."""


def _nothing() -> None:
    pass


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
            return _nothing
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
            each.interrupt(ServiceError("DRAINING", "the service is shutting down", retry_after_s=5))

    async def offload(self, function: Callable[..., T], *arguments: object) -> T:
        """Run `function` in a thread, and return its result. It must release the GIL, and be too long for the event
        loop.
        """
        return await self._threads.run(function, *arguments)

    async def answer(self, call: Call[Answer]) -> Answer:
        """Answer a call. Raises ServiceError, ClientLeftError; cancelled, it gives everything back."""
        with Interruption(call.context.task, among=self._under_way) as ending:
            context, recorder = call.context, call.context.recorder
            call.version = call.version or self.link.version(call.model)
            served = self.link.find(call.model, call.version)
            # A version is counted as a model of its own; two stages have a name of their own.
            context.model = served.model.name if call.model in self.link.models else call.model
            terms = call.terms(self.link.settings)
            terms.client = context.caller.name
            await self.link.check(served, terms)
            context.caller.check_priority(terms.priority)
            with (
                self.limits.request(context.caller) as client_lease,
                self.bodies.lease(context.caller.name, client_lease) as lease,
            ):
                terms.client_lease = client_lease
                try:
                    with interrupted_at(terms.deadline_s, ending.task) as limit:
                        await call.read(lease, limit)
                        upload_s = clock.monotonic() - context.started_s
                        served.metrics.stage_seconds["upload"].observe(upload_s, recorder.exemplar)
                        run = await call.prepare(self, served, terms, lease)
                except (ServiceError, ClientLeftError) as error:
                    recorder.upload_failed(served.metrics, error)
                    raise
                return await call.watched(run(), recorder.abandon)
