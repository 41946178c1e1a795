"""The link between processes: what an ingress and the owner say to each other, as records.

    ingress ─► IngressReady, NotStarted, Ask, Reserve, Submit, Cancel, Leave, Closed, Carry, Gained, Here
    owner   ─► IngressBegin, NewConnection, Asked, ItemComputed, ItemFailed, NewModels, Serves, Calm, NewShares, …

Owns: these records and their checks against what they may name. Bodies lie in shared memory (app.processes.blocks), a
large result in memory of its own. Must not know what either side does. Each token gets exactly one ItemComputed or
ItemFailed, also after a Cancel; only then is what it brought the ingress's again.
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
"""A larger result comes in memory of its own."""


class Record(msgspec.Struct, array_like=True, tag=True):
    """What all of them are."""


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
    """Put what fills slots into shared memory, by `write`, which says where it lies."""

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
    """What `placed` has put there. Raises ValueError for what lies elsewhere."""

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
    """The ingress takes connections, `connections` at most. With a descriptor: of the memory in which bodies lie."""

    connections: int


class NotStarted(Record):
    """The ingress cannot start, for the reason, and ends."""

    reason: str


class Ask(Record):
    """`Link.check`: Asked is the answer."""

    token: int
    model: int
    deadline_s: float
    priority: int
    client: str


class Reserve(Record):
    """`Link.reserve`: what it raises, each token of the room hears."""

    room: int
    model: int
    count: int
    deadline_s: float
    priority: int
    client: str
    request_id: str


class Submit(Record):
    """`Link.submit`, of images or of rows of tensors."""

    room: int
    tokens: tuple[int, ...]
    position: int
    content: At
    options: Options | None = None
    tensor_options: TensorOptions | None = None


class Cancel(Record):
    """`Link.cancel`. `abandoned`: the client has left."""

    room: int
    token: int
    abandoned: bool


class Leave(Record):
    """The room is not wanted any more."""

    room: int


class Closed(Record):
    """A connection has ended, by the number that it came with."""

    connection: int


class Carry(Record):
    """A connection goes on with what is not for an ingress. With a descriptor: the end that the owner is to serve."""

    connection: int
    encrypted: bool


class Gained(Record):
    """What was counted since the last one (app.observability.gained)."""

    content: bytes


class Here(Record):
    """The answer to Look."""


ToOwner: TypeAlias = (
    IngressReady | NotStarted | Ask | Reserve | Submit | Cancel | Leave | Closed | Carry | Gained | Here
)


class IngressBegin(Record):
    """The first. `floats`: of each model its form that takes normalised tensors, -1 where there is none; the first
    `names` are the models that clients see. `share`: of the bytes that requests may hold. With a descriptor: all forms,
    packed, in order.
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
    """`refusal`: None where it may come."""

    token: int
    refusal: SaidError | None


class SaidError(msgspec.Struct, array_like=True):
    """A ServiceError."""

    code: str
    message: str
    retry_after_s: int | None

    @classmethod
    def of(cls, error: ServiceError) -> SaidError:
        """The error as a record."""
        return cls(error.code, error.message, error.retry_after_s)

    def error(self) -> ServiceError:
        """The error again."""
        return ServiceError(self.code, self.message, retry_after_s=self.retry_after_s)  # type: ignore[arg-type]


class ItemComputed(Record):
    """`app.link.Result`. `arrays`: kinds and shapes, None for NaN or infinity; `data`: their bytes one after the other,
    b"" where a descriptor is with it. `batch`: of a span its trace, its id, its flags.
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
    """The item's one reply is an error."""

    token: int
    refusal: SaidError


class NewModels(Record):
    """Models that results may name, by their number, of each form. With a descriptor: they, packed, in this order."""

    numbers: dict[int, int]


class Serves(Record):
    """The number of what each of these forms is from now on."""

    numbers: dict[int, int]


class Calm(Record):
    """What is asked of these forms is let in without a question: little waits for them."""

    forms: tuple[int, ...]


class NewShares(Record):
    """The shares of versions, all of them."""

    shares: dict[str, Mapping[str, float]]


class Draining(Record):
    """The service is shutting down; it may still take requests."""


class End(Record):
    """What has no answer yet gets DRAINING, and the process ends once its connections have."""


class Look(Record):
    """Here is the answer of who is not hung."""


ToIngress: TypeAlias = (
    IngressBegin
    | NewConnection
    | Asked
    | ItemComputed
    | ItemFailed
    | NewModels
    | Serves
    | Calm
    | NewShares
    | Draining
    | End
    | Look
)
