"""Service in virtual time, owner and ingress; clients call the ingress like a transport, without one.

    async with serving(decode_s=0.01, batch_s=0.008) as service:
        outcome = await service.ask(timeout_s=0.25)

Owns: the service, and a transport that has no bytes. Must not know the assertions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from app import clock
from app.access.access import HIGHEST_PRIORITY, Caller
from app.access.keys import CallerLimits
from app.config import Settings
from app.errors import ServiceError
from app.ingress.context import RequestContext
from app.ingress.ingress import Call, Ingress, Run
from app.ingress.prediction import Answer, computed
from app.link import ServedModel, Terms
from app.serving.opening import Opening, chosen
from app.serving.service import Service
from models import Options
from tests.support.virtual_processes import Processes, in_place_of_processes

T = TypeVar("T")
MODEL = "resnet18"
IMAGE = bytes(50_000)
"""Body of an image; decoders here do not read it."""
_SCOPE = {"method": "POST", "path": "/", "headers": (), "client": ("127.0.0.1", 1)}


class Outcome(NamedTuple):
    """Result of a request ("OK" or an error's code), time of sending and of the answer (`clock.monotonic()`)."""

    code: str
    sent_s: float
    came_s: float

    @property
    def seconds(self) -> float:
        """Seconds that the answer took."""
        return self.came_s - self.sent_s


class _Call(Call[Answer]):
    def __init__(self, context: RequestContext, model: str, timeout_s: float, priority: int) -> None:
        super().__init__(context, model)
        self.timeout_s, self.priority = timeout_s, priority

    def terms(self, settings: Settings) -> Terms:
        return Terms(self.context.started_s + self.timeout_s, self.priority, self.context.recorder)

    async def read(self, lease: Any, limit: Any) -> None:
        lease.take(len(IMAGE))

    async def prepare(self, ingress: Ingress, served: ServedModel, terms: Terms, lease: Any) -> Run[Answer]:
        return lambda: computed(ingress, served, [IMAGE], terms, options=OPTIONS, finish=lambda *_: None)

    async def watched(self, running: Awaitable[T], on_leave: Callable[[], None]) -> T:
        return await running


OPTIONS = Options()


class VirtualService:
    """Client of a service. `outcomes`: of all requests, in the order of the answers."""

    def __init__(self, service: Service, processes: Processes) -> None:
        self.service, self.processes = service, processes
        self.ingress = Ingress(service.link, None)  # type: ignore[arg-type]
        self.outcomes: list[Outcome] = []

    async def ask(
        self, model: str = MODEL, *, timeout_s: float = 60.0, priority: int = 0, client: str = "127.0.0.1"
    ) -> Outcome:
        """Ask for one image of a client."""
        with RequestContext(self.service.link, dict(_SCOPE)) as context:
            context.caller = Caller(client, CallerLimits(priority=HIGHEST_PRIORITY))
            try:
                await self.ingress.answer(_Call(context, model, timeout_s, priority))
                code = "OK"
            except ServiceError as error:
                code = context.code = error.code
        outcome = Outcome(code, context.started_s, clock.monotonic())
        self.outcomes.append(outcome)
        return outcome

    async def pause(self, part: str, seconds: float) -> None:
        """Let a part stand still ("worker", "decoders", or "service": these and this loop); return when it goes on."""
        for process in self.processes.parts(part):
            process.pause(seconds)
        if part == "service":
            asyncio.get_running_loop().stand_still(seconds)  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(seconds)

    def counted(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series that have these labels."""
        families = [*self.service.metrics.registry.collect()]
        assert name.removesuffix("_total") in {family.name for family in families}, f"there is no {name}"
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@functools.cache
def _opened(models: tuple[str, ...], folder: str) -> tuple[Settings, Sequence[Any], Any]:
    given: dict[str, Any] = {
        "models": ",".join(models),
        "device": "null",
        "weights": "random",
        "null": "fail=999999999",  # The device looks at its images, so that they are decoded.
        "cache_dir": folder,
        "decoders": 2,
    }
    settings = Settings(**given)
    return settings, Opening().models(settings, "", said=lambda _: None), chosen(settings)


@contextlib.asynccontextmanager
async def serving(
    folder: Any, *, decode_s: float, batch_s: Mapping[int, float], models: Sequence[str] = (MODEL,), **settings: Any
) -> AsyncIterator[VirtualService]:
    """Start a service. `decode_s`: time of an image on each of two decoders; `batch_s`: time by batch size."""
    processes = Processes(lambda _: decode_s, lambda run: batch_s[run.batch_size], batch_s)
    base, opened, choice = _opened(tuple(models), str(folder))
    with in_place_of_processes(processes):
        settings["batch_sizes"] = ",".join(map(str, batch_s))
        service = Service(base.model_copy(update=settings), opened, None, choice)
        await service.start()
        virtual = VirtualService(service, processes)
        try:
            yield virtual
        finally:
            assert service.images_under_way() == 0
            await virtual.ingress.close()
            await service.stop()
