"""The link between processes: messages of an ingress and the owner, and the checks of what they may name.

Bodies lie in shared memory (app.processes.arena), a large result in memory of its own. Each token gets exactly one
ItemComputed or ItemFailed, also after a Cancel; only then the ingress may use the token's memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

from app.errors import ServiceError
from app.link import Array, Content, Frame, Regions, TensorRow
from models import Options, Placement, TensorOptions
from models.contract.cascade import Region

INLINE_BYTES = 16 * 1024
"""Largest result within a message; a larger one comes in memory of its own."""


class Record(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages."""


class ArrayAt(msgspec.Struct, array_like=True):
    """An array of `size` bytes in shared memory."""

    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


class EncodedAt(Record):
    """An encoded image, or with `regions` parts of it."""

    start: int
    size: int
    regions: tuple[Region, ...] = ()


class FrameAt(Record):
    """A `Frame`."""

    pixels: ArrayAt
    width: int
    height: int
    placed: bool


class RowAt(Record):
    """A `TensorRow`."""

    inputs: dict[str, ArrayAt]


At: TypeAlias = EncodedAt | FrameAt | RowAt


def placed(content: Content, write: Callable[[memoryview], int]) -> At:
    """Put the content of slots into shared memory, by `write`, which returns its place."""

    def put(array: Array) -> ArrayAt:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return ArrayAt(array.dtype.str, array.shape, write(data), data.nbytes)

    match content:
        case Frame():
            return FrameAt(put(content.pixels), content.width, content.height, content.placed)
        case TensorRow():
            return RowAt({name: put(each) for name, each in content.inputs.items()})
        case Regions():
            image = memoryview(content.image)
            return EncodedAt(write(image), len(image), tuple(content.regions))
    image = memoryview(content)
    return EncodedAt(write(image), len(image))


def found(at: At, memory: memoryview) -> Content:
    """Return the content that `placed` has put there. Raises ValueError if it lies outside of the memory."""

    def data(start: int, size: int) -> memoryview:
        if not 0 <= start <= start + size <= len(memory):
            raise ValueError(f"{size} bytes at {start} are outside of the {len(memory)} there are")
        return memory[start : start + size]

    def array(each: ArrayAt) -> Array:
        return np.frombuffer(data(each.start, each.size), np.dtype(each.kind)).reshape(each.shape)

    match at:
        case FrameAt():
            return Frame(array(at.pixels), at.width, at.height, at.placed)
        case RowAt():
            return TensorRow({name: array(each) for name, each in at.inputs.items()})
    image = data(at.start, at.size)
    return Regions(image, at.regions) if at.regions else image


class IngressReady(Record):
    """The ingress takes connections, `connections` at most. Its descriptor: the memory in which bodies lie."""

    connections: int


class Ask(Record):
    """Call of `Link.check`; the reply is Asked."""

    token: int
    model: int
    deadline_s: float
    priority: int
    client: str


class Reserve(Record):
    """Call of `Link.reserve`; an error goes to each token of the room."""

    room: int
    model: int
    count: int
    deadline_s: float
    priority: int
    client: str
    request_id: str


class Submit(Record):
    """Call of `Link.submit`, for images or for rows of tensors."""

    room: int
    tokens: tuple[int, ...]
    position: int
    content: At
    options: Options | None = None
    tensor_options: TensorOptions | None = None


class Cancel(Record):
    """Call of `Link.cancel`. `abandoned`: the client has left."""

    room: int
    token: int
    abandoned: bool


class Leave(Record):
    """End of a room: it is not wanted any more."""

    room: int


class Closed(Record):
    """End of a connection, by the number that it came with."""

    connection: int


class Tunnelled(Record):
    """Connection whose next request is not for an ingress. Its descriptor: the end of the socket for the owner."""

    connection: int
    encrypted: bool


class CounterDeltas(Record):
    """Counts since the last one (app.observability.counter_deltas)."""

    content: bytes


class Here(Record):
    """Reply to the liveness probe Look."""


ToOwner: TypeAlias = IngressReady | Ask | Reserve | Submit | Cancel | Leave | Closed | Tunnelled | CounterDeltas | Here


class IngressBegin(Record):
    """First message. `floats`: for each model its form that takes normalised tensors, -1 for none; the first `names`
    are the models that clients see. `share`: of the bytes that requests may hold. Its descriptor: all forms, packed, in
    order.
    """

    settings: dict[str, Any]
    written: dict[str, str]
    names: int
    floats: tuple[int, ...]
    simulated: bool
    share: float


class NewConnection(Record):
    """A connection, with its descriptor."""

    connection: int


class Asked(Record):
    """Reply to Ask. `refusal`: None if the request may come."""

    token: int
    refusal: SentError | None


class SentError(msgspec.Struct, array_like=True):
    """A ServiceError as a record."""

    code: str
    message: str
    retry_after_s: int | None

    @classmethod
    def of(cls, error: ServiceError) -> SentError:
        """Make the record of an error."""
        return cls(error.code, error.message, error.retry_after_s)

    def error(self) -> ServiceError:
        """Make the error of the record."""
        return ServiceError(self.code, self.message, retry_after_s=self.retry_after_s)  # type: ignore[arg-type]


class ItemComputed(Record):
    """Reply with an `app.link.Result`. `arrays`: kinds and shapes, None for NaN or infinity; `data`: their bytes one
    after the other, b"" if they come with a descriptor. `batch`: trace, id and flags of its span.
    """

    token: int
    arrays: tuple[tuple[str, tuple[int, ...]], ...] | None
    data: bytes
    model: int
    computed_by: tuple[str, str, str, str]
    placement: Placement
    begun_s: float
    queued_s: float
    infer_s: float
    batch: tuple[str, str, int] | None


class ItemFailed(Record):
    """Reply with an error, the item's one reply."""

    token: int
    refusal: SentError


class NewModels(Record):
    """Models that results may name: their numbers by form. Its descriptor: the models, packed, in this order."""

    numbers: dict[int, int]


class Serves(Record):
    """Numbers of the models that these forms are from now on."""

    numbers: dict[int, int]


class Uncongested(Record):
    """Forms for which little waits: their requests are admitted without a question."""

    forms: tuple[int, ...]


class NewShares(Record):
    """Shares of versions, all of them."""

    shares: dict[str, Mapping[str, float]]


class Draining(Record):
    """Shutdown of the service, which may still take requests."""


class End(Record):
    """End of the process: requests without an answer get DRAINING, and it ends once its connections have ended."""


class Look(Record):
    """Liveness probe; the reply is Here."""


ToIngress: TypeAlias = (
    IngressBegin
    | NewConnection
    | Asked
    | ItemComputed
    | ItemFailed
    | NewModels
    | Serves
    | Uncongested
    | NewShares
    | Draining
    | End
    | Look
)
