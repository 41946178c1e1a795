"""The link between the two halves of the service: the owner of queues and processes, and the ingress.

    ingress                     link                                  owner
    connections, keys, bodies ─ check, reserve, submit, cancel ─────► queues, decoders, workers
    postprocessing, JSON      ◄ one reply for each token ────────────
                              ─ what is there, load, unload, release ► administration

Owns: these records and these calls, and nothing behind them. The ingress (http, grpc, compat, protocols, ingress) knows
nothing else of the owner (serving, scheduling, fleet, decoding, worker), and the owner nothing of the ingress. Both
live in one process and one event loop, where the owner's class implements the calls in memory. With --ingresses there
are more ingresses, each in a process of its own; app.link_messages has the messages between them. Must not know a
transport, nor how anything is computed.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy.typing as npt
from pydantic import BaseModel

from app.access.access import ClientLease
from app.config import Settings
from app.core import ServedOn
from app.errors import ServiceError, of_image
from app.images.header import ImageError, ImageTooLargeError, check_pixels, read_header
from app.observability.metrics import Metrics, ModelMetrics, Recorder
from app.observability.tracing import Tracing
from app.observability.triton_statistics import FIRST_VERSION, ModelStatistics
from models import Model, Options, Placement, TensorOptions
from models.contract.cascade import Cascade, Region

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

Array = npt.NDArray[Any]
Encoded = bytes | bytearray | memoryview

INLINE_BYTES = 1 << 20
"""Largest size of arrays that are copied in the event loop: a hop to a thread would cost more."""


class ServedModel:
    """One model as clients see it. `index`: its number; `model` is another object after a load.

    A model of images may have a second form, which takes normalised tensors (`models.NormalisedModel`). That form is a
    served model of its own, with the metrics and statistics of the model it belongs to.
    """

    def __init__(self, index: int, model: Model, metrics: ModelMetrics, statistics: ModelStatistics) -> None:
        self.index, self.model, self.metrics, self.statistics = index, model, metrics, statistics
        self.floats: ServedModel | None = None
        """Form that takes normalised tensors, if that is enabled."""
        self.signature: tuple[Model, Any] | None = None
        """Model, and the signature that app.protocols.signatures has computed from it. It is kept for each request."""


class Terms(msgspec.Struct):
    """Terms of a request. `deadline_s` is in `time.monotonic()`; priority 0 is normal, and higher ones go first.
    `client`: whose request it is; `client_lease`: of the client's limits, None if nothing counts it;
    `check_priority`: raises FORBIDDEN for a priority that the client may not have. `room`: the one that `check` has
    found free before the body was read.
    """

    deadline_s: float
    priority: int = 0
    recorder: Recorder = msgspec.field(default_factory=Recorder)
    client: str = ""
    client_lease: ClientLease | None = None
    check_priority: Callable[[int], None] | None = None
    room: Room | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """An image that needs no decoding.

    `placed`: it is the network's input as it is, in any type and order; else uint8 [height, width, 3], and resized like
    a decoded image.
    """

    pixels: Array
    width: int
    height: int
    placed: bool = True


class TensorRow(NamedTuple):
    """A row of a request's tensors, at its position in the request."""

    inputs: Mapping[str, Array]


class Regions(NamedTuple):
    """Parts of an encoded image, each an item of its own; the image is decoded once."""

    image: Encoded
    regions: Sequence[Region]


Content: TypeAlias = Encoded | Frame | TensorRow | Regions
"""Content of slots: of one, or of Regions one each."""


class ReturnedBytes(NamedTuple):
    """Bytes that a release returned, by release level: the device's, and by how much the worker's host memory fell."""

    device: Mapping[int, int]
    host: Mapping[int, int]


class ComputedBy(NamedTuple):
    """Weights, device, engine and precision that computed an item."""

    weights: str
    device: str
    engine: str
    precision: str


class Result(msgspec.Struct):
    """Result of a worker for one item.

    `arrays`: as `Model.reduce` returned them, None if the network computed NaN or infinity; `model`: the worker's own,
    which after a load may differ from the served one; `placement`: the image's place in the network's input. Its slot
    was being filled since `begun_s`, it waited for a worker since `queued_s` (`time.monotonic()`); the device took
    `infer_s`. `batch`: the span of its batch, if that is traced.
    """

    arrays: tuple[Array, ...] | None
    model: Model
    computed_by: ComputedBy
    placement: Placement
    begun_s: float
    queued_s: float
    infer_s: float
    batch: SpanContext | None = None


Reply: TypeAlias = Result | ServiceError


def too_late() -> ServiceError:
    """Make the error for an accepted item whose deadline has passed."""
    return ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the answer was there")


def image_refusal(error: ImageError) -> ServiceError:
    """Make the error for an encoded image that cannot be used."""
    return ServiceError("IMAGE_TOO_LARGE" if isinstance(error, ImageTooLargeError) else "INVALID_IMAGE", str(error))


def measured(image: Encoded, lease: ClientLease | None, max_pixels: int) -> tuple[int, int]:
    """Return width and height of an image as displayed, by its header alone; `lease`: they count against it.

    Raises INVALID_IMAGE, IMAGE_TOO_LARGE, QUEUE_FULL.
    """
    try:
        header = read_header(image)
        check_pixels(header, max_pixels)
    except ImageError as error:
        raise image_refusal(error) from None
    if lease is not None and lease.counts_pixels:
        lease.hold_pixels(header.width * header.height)
    return header.width, header.height


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
    """State of a model: it says what a request can expect now."""

    READY = "ready"
    STARTING = "starting"
    """State without a worker, but one is being started: requests wait for it until their deadlines."""
    ON_DEMAND = "on demand"
    """State without a worker that has it; one loads it as soon as it is asked for: requests wait for that."""
    UNAVAILABLE = "unavailable"
    """State without a worker, and none is being started: requests are refused."""
    UNLOADED = "unloaded"
    """State of a model that was or is being unloaded: requests are refused until it is loaded again."""

    @property
    def accepts_requests(self) -> bool:
        """True if a request can be answered, now or after a wait."""
        return self.is_ready or self is ModelState.STARTING

    @property
    def is_ready(self) -> bool:
        """True if the model answers when it is asked, at once or once it is loaded."""
        return self is ModelState.READY or self is ModelState.ON_DEMAND


class Administration(ABC):
    """The owner's answers to status routes and administrators: documents, and changes of what is served."""

    draining: bool
    """True if the service is shutting down; it may still take requests."""

    @abstractmethod
    def why_not(self, model: str = "") -> str:
        """Return why the service, or a model, cannot be asked now, in one sentence; empty if it can."""

    @abstractmethod
    def state(self, model: str) -> tuple[ModelState, str]:
        """Return the state of a model, and why it is not ready; empty if it is."""

    @abstractmethod
    def served_on(self, model: str) -> list[ServedOn]:
        """Return how each ready worker serves a model."""

    @abstractmethod
    def profile_of(self, model: str) -> str:
        """Return the name of the profile that a model is served by; empty if there is none."""

    @abstractmethod
    def devices(self) -> Devices:
        """Return the devices in use."""

    @abstractmethod
    def workers(self) -> list[str]:
        """Return the device of each ready worker."""

    @abstractmethod
    def set_traffic(self, model: str, shares: Mapping[str, float]) -> None:
        """Let versions of a model answer these shares of its requests from now on. Raises INVALID_REQUEST."""

    @abstractmethod
    async def load(self, model: str) -> None:
        """Read a model's weights again and hand over to workers that have them, without losing a request.

        Raises MODEL_NOT_FOUND, INVALID_REQUEST if the weights cannot be read or are of a network with another input,
        QUEUE_FULL while another change goes on, INTERNAL if a worker cannot start with them; all workers then serve on
        with the old ones. If cancelled, it goes on.
        """

    @abstractmethod
    async def unload(self, model: str) -> None:
        """Refuse new requests for a model, answer those in flight, and hand over to workers without it. Idempotent.

        Raises MODEL_NOT_FOUND, QUEUE_FULL; INTERNAL if a worker cannot start without it: the model then serves on. If
        cancelled, it goes on.
        """

    @abstractmethod
    async def release(self, device: str) -> dict[str, ReturnedBytes]:
        """Have a device's workers release cached memory; return bytes by worker. Raises NOT_FOUND."""

    def check(self, *models: str) -> None:
        """Raise DRAINING or NOT_READY, with the reason, unless the service, or each of these models, is ready."""
        for model in models or ("",):
            if reason := self.why_not(model):
                raise ServiceError("DRAINING" if self.draining else "NOT_READY", reason, retry_after_s=1)


class Room(ABC):
    """Room in a model's queue for the images of one request, as long as the context lasts."""

    __slots__ = ()  # Subclasses have the attributes, some in slots, as many are made.
    served: ServedModel
    terms: Terms

    def __enter__(self) -> Room:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Give the room back; cancel every item that has no reply yet."""


@dataclass(frozen=True)
class Tables:
    """Tables that the owner sends before the first request. `models` and `cascades`: by the names that clients use;
    `traffic`: the shares of versions, which may change.
    """

    settings: Settings
    models: Mapping[str, ServedModel]
    cascades: Mapping[str, Cascade]
    metrics: Metrics
    tracing: Tracing | None
    simulated: bool
    administration: Administration
    traffic: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Link(ABC):
    """One ingress's end of the link: the tables, and the calls."""

    def __init__(self, tables: Tables) -> None:
        self.settings, self.metrics, self.tracing = tables.settings, tables.metrics, tables.tracing
        self.models, self.cascades = tables.models, tables.cascades
        self.simulated, self.administration = tables.simulated, tables.administration
        self.traffic = tables.traffic

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of the models that answer under a name: one, or a cascade's. Raises MODEL_NOT_FOUND."""
        cascade = self.cascades.get(name)
        names = (name,) if cascade is None else cascade.models
        if names[0] not in self.models:
            known = ", ".join((*self.models, *self.cascades))
            raise ServiceError("MODEL_NOT_FOUND", f"there is no model {name!r} here; there is {known}")
        return names

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return the model of this name, of a cascade the first, in a version that exists; the first version if none is
        named. Raises MODEL_NOT_FOUND.
        """
        return self.choose(name, version or FIRST_VERSION)

    def choose(self, name: str, version: str = "") -> ServedModel:
        """Return the model that answers the next request for a name, of a cascade the first. The shares choose its
        version if the request names none. Raises MODEL_NOT_FOUND.
        """
        first = name if name in self.models else self.parts(name)[0]
        if not version and (shares := self.traffic.get(first)):
            name, [version] = first, random.choices([*shares], [*shares.values()])
        if version in ("", FIRST_VERSION):
            return self.models[first]
        if f"{name}@{version}" not in self.models:
            known = ", ".join(self.versions(name))
            raise ServiceError("MODEL_NOT_FOUND", f"{name} has no version {version!r}; it has version {known}")
        return self.models[f"{name}@{version}"]

    def versions(self, name: str) -> list[str]:
        """Return all versions of a model."""
        return [FIRST_VERSION, *(each.partition("@")[2] for each in self.models if each.startswith(f"{name}@"))]

    def count(self, served: ServedModel, code: str, seconds: float, recorder: Recorder) -> None:
        """Count a request that has ended with `code` ("OK" or an error's) after `seconds`."""
        served.statistics.request(code, seconds, recorder.seconds)
        served.metrics.answered(code, seconds, recorder.exemplar)

    def connect(self, on_reply: Callable[[int, Reply], None]) -> None:
        """Call `on_reply` with each reply and its token from now on."""
        self._on_reply = on_reply

    @abstractmethod
    def check(self, served: ServedModel, terms: Terms) -> Awaitable[None]:
        """Refuse a request of at least one image before its body is read, if it would be refused afterwards.

        Raises DRAINING, NOT_READY, QUEUE_FULL, DEADLINE_UNREACHABLE. It reserves nothing: an upload may take its time.
        """

    @abstractmethod
    def reserve(self, served: ServedModel, count: int, terms: Terms) -> Room:
        """Reserve room in the queue for the `count` items of a request.

        Raises DEADLINE_EXCEEDED, NOT_READY, INVALID_REQUEST, QUEUE_FULL, DEADLINE_UNREACHABLE.
        """

    def sizes(self, images: Sequence[Encoded], terms: Terms) -> list[tuple[int, int]]:
        """Return width and height of images as displayed, by their headers alone; their pixels count from now on.

        Raises INVALID_IMAGE, IMAGE_TOO_LARGE, QUEUE_FULL.
        """
        found = []
        for number, image in enumerate(images):
            try:
                found.append(measured(image, terms.client_lease, self.settings.max_image_pixels))
            except ServiceError as error:
                raise (of_image(number, error) if len(images) > 1 else error) from None
        return found

    @abstractmethod
    def submit(
        self, room: Room, tokens: Sequence[int], content: Content, options: Options | TensorOptions, position: int
    ) -> None:
        """Submit the items of `content` for which there is `room`: one, or of Regions one each.

        `tokens`: the ingress's names for them, each used once; `position`: of the first one in its request. Raises
        nothing: each token gets exactly one reply, perhaps before this returns, at the latest at the deadline.
        """

    @abstractmethod
    def cancel(self, token: int) -> None:
        """Cancel an item that is not wanted any more: its one reply, an error, comes now unless it came before.

        Its slot is free once no process looks at it any more.
        """
