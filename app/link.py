"""What passes between the two halves of the service: the owner of queues and processes, and the ingress.

    ingress                     link                                  owner
    connections, keys, bodies ─ check, reserve, submit, cancel ─────► queues, decoders, workers
    postprocessing, JSON      ◄ one reply for each token ────────────
                              ─ what is there, load, unload, release ► administration

Owns: these records and these calls, and nothing behind them. The ingress (http, grpc, compat, protocols, ingress) knows
nothing else of the owner (serving, scheduling, fleet, decoding, worker), and the owner nothing of the ingress. Today
both live in one process and one event loop, and the owner's class implements the calls in memory; nothing here needs
that: tokens are numbers, replies are records. Must not know a transport, nor how anything is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel

from app.config import Settings
from app.errors import ServiceError
from app.observability.metrics import Exemplar, Metrics, ModelMetrics
from app.observability.tracing import Tracing
from app.observability.triton_statistics import ModelStatistics
from models import Model
from models.tasks.tiles import Tiling


class ServedModel:
    """One model as clients see it. `index`: its number; `model` is another object after a load.

    A model of images may have a second form, which takes normalised tensors (`models.NormalisedModel`). That form is a
    served model of its own, whose metrics and statistics are those of the model it belongs to.
    """

    def __init__(self, index: int, model: Model, metrics: ModelMetrics, statistics: ModelStatistics) -> None:
        self.index, self.model, self.metrics, self.statistics = index, model, metrics, statistics
        self.floats: ServedModel | None = None
        """The form that takes normalised tensors, where that is enabled."""
        self.signature: tuple[Model, Any] | None = None
        """What app.protocols.signatures computed from a model, and from which one. It is kept for each request."""


@dataclass(frozen=True, slots=True)
class Cascade:
    """Two models under one name: a detector, and a classifier of what it finds.

    `first` and `second`: names of served models. Boxes of `classes` (labels; none: all), at least `min_side` pixels
    wide and high, the `most` best of an image, are cut out with `margin` of their sides around them.
    """

    name: str
    first: str
    second: str
    classes: tuple[str, ...] = ()
    margin: float = 0.0
    min_side: float = 8.0
    most: int = 20

    @property
    def platform(self) -> str:
        """As Triton calls a model that is made of others."""
        return "ensemble"


class DecodedBy(BaseModel):
    """Who decodes JPEG files: the `host` or the `device`. `refusal`: why the device does not, where it was asked to;
    `errors`: of answers to what it decodes against those to what the host decodes.
    """

    by: str
    refusal: str
    errors: dict[str, float]


class ServedOn(BaseModel):
    """How a device serves a model. `staged`: another engine or precision is made ready meanwhile, and takes over."""

    device: str
    engine: str
    precision: str
    staged: bool
    batch_sizes: list[int]
    refusals: dict[str, str]
    errors: dict[str, float]
    operators: dict[str, str]
    decoding: DecodedBy


class DeviceStatus(BaseModel):
    """A device the service uses."""

    device: str
    name: str
    vendor: str
    simulated: bool
    ready: bool


class Devices(BaseModel):
    """Devices in use, and why other vendors were not chosen."""

    devices: list[DeviceStatus]
    refusals: dict[str, str]


class ModelState(Enum):
    """What a request for a model can expect now."""

    READY = "ready"
    """A worker serves the model."""
    STARTING = "starting"
    """No worker serves it, but one is being started: requests wait for it until their deadlines."""
    UNAVAILABLE = "unavailable"
    """No worker serves it, and none is being started: requests are refused."""
    UNLOADED = "unloaded"
    """It was unloaded, or is being unloaded: requests are refused until it is loaded again."""

    @property
    def accepts_requests(self) -> bool:
        """Whether a request can be answered, now or after a wait."""
        return self in (ModelState.READY, ModelState.STARTING)


class Administration(ABC):
    """What status routes and administrators ask of the owner: documents, and changes of what is served."""

    draining: bool
    """The service is shutting down; it may still take requests."""

    @abstractmethod
    def why_not(self, model: str = "") -> str:
        """Why the service, or a model, cannot be asked now, in one sentence; empty when it can."""

    @abstractmethod
    def state(self, model: str) -> tuple[ModelState, str]:
        """The state of a model, and why it is not ready; that is empty when it is."""

    @abstractmethod
    def served_on(self, model: str) -> list[ServedOn]:
        """How each ready worker serves a model."""

    @abstractmethod
    def profile_of(self, model: str) -> str:
        """What the profile that a model is served by is called; empty where there is none."""

    @abstractmethod
    def devices(self) -> Devices:
        """The devices in use."""

    @abstractmethod
    def workers(self) -> list[str]:
        """The device of each ready worker."""

    @abstractmethod
    async def load(self, model: str) -> None:
        """Read a model's weights again and hand over to workers that have them, without losing a request.

        Raises MODEL_NOT_FOUND, INVALID_REQUEST when the weights cannot be read or are of a network with another input,
        QUEUE_FULL while another change goes on, INTERNAL when a worker cannot start with them; all workers then serve
        on with the old ones. Cancelled, it goes on.
        """

    @abstractmethod
    async def unload(self, model: str) -> None:
        """Refuse new requests for a model, answer those under way, and hand over to workers without it. Idempotent.

        Raises MODEL_NOT_FOUND, QUEUE_FULL; INTERNAL when a worker cannot start without it: the model then serves on.
        Cancelled, it goes on.
        """

    @abstractmethod
    async def release(self, device: str) -> dict[str, dict[int, int]]:
        """Have a device's workers give cached memory back: bytes by worker and release level. Raises NOT_FOUND."""

    def check(self, *models: str) -> None:
        """Raises DRAINING or NOT_READY, with the reason, unless the service, or each of these models, is ready."""
        for model in models or ("",):
            if reason := self.why_not(model):
                raise ServiceError("DRAINING" if self.draining else "NOT_READY", reason, retry_after_s=1)


class Link:
    """One ingress's end of the link: what is there, which the owner says before the first request, and the calls."""

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, ServedModel],
        cascades: Mapping[str, Cascade],
        tilings: Mapping[str, Tiling],
        *,
        metrics: Metrics,
        tracing: Tracing | None,
        simulated: bool,
        administration: Administration,
    ) -> None:
        """`models` and `cascades`: by the names that clients use; `tilings`: of models, where `--tiles` names them."""
        self.settings, self.metrics, self.tracing, self.administration = settings, metrics, tracing, administration
        self.models, self.cascades, self.tilings, self.simulated = models, cascades, tilings, simulated

    def parts(self, name: str) -> tuple[str, ...]:
        """The names of the models that answer under a name: one, or those of a cascade. Raises MODEL_NOT_FOUND."""
        cascade = self.cascades.get(name)
        names = (name,) if cascade is None else (cascade.first, cascade.second)
        if names[0] not in self.models:
            known = ", ".join((*self.models, *self.cascades))
            raise ServiceError("MODEL_NOT_FOUND", f"there is no model {name!r} here; there is {known}")
        return names

    def find(self, name: str) -> ServedModel:
        """The model of this name; of a cascade, the first. Raises MODEL_NOT_FOUND."""
        return self.models[self.parts(name)[0]]

    def count(self, name: str, code: str, seconds: float, exemplar: Exemplar | None = None) -> None:
        """Count a request that has ended with `code` ("OK" or an error's) after `seconds`."""
        served = self.find(name)
        served.metrics.answered(code, seconds, exemplar)
        served.statistics.request(code, seconds)
