"""Cascades: several models under one name. Later models see parts of the image that earlier models found.

    name=KIND:REST ─► Cascade ─► its models, served like any ─► CascadeRequest.whole, .parts ─► one entry an image

Owns: that contract, and finding cascades that other packages bring, through the entry-point group `anychip.cascades`
(docs/own-tasks.md). Must not know how anything is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

import msgspec

from anychip_base.extras import entry_points
from models.contract.errors import ModelError, reason_of
from models.contract.model import Model, Options

GROUP = "anychip.cascades"
_Pixels = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""Bounded, as processes that are not trusted send regions, which must fit beside an image in a decoder's memory."""


class Region(NamedTuple):
    """A part of an image, in pixels of the image as displayed.

    `corners`: x and y of a quadrilateral's upper left, upper right, lower right and lower left, which is straightened
    to `width` by `height`; `x` and `y` mean nothing then. `quarters`: turns of 90 degrees after that, counterclockwise.
    """

    x: _Pixels
    y: _Pixels
    width: _Pixels
    height: _Pixels
    quarters: _Pixels = 0
    corners: Annotated[tuple[float, ...], msgspec.Meta(max_length=8)] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height after the turns."""
        return (self.height, self.width) if self.quarters % 2 else (self.width, self.height)


class CascadeRequest(Protocol):
    """Images of one request, and the calls to models about them. An error of a call ends the request."""

    def sizes(self) -> list[tuple[int, int]]:
        """Return width and height of each image as displayed, from its header."""

    async def whole(self, model: str) -> list[dict[str, Any]]:
        """Return a model's answer to each image."""

    async def parts(self, model: str, parts: Sequence[tuple[int, Region]]) -> list[dict[str, Any]]:
        """Return a model's answers to parts, each with its image's number; parts of one image stand together.

        The parts are sent in portions, so that any number of them fits into the model's queue.
        """


class Cascade(ABC):
    """A cascade of models. `name`: the name for clients; `models`: the names of the models that it asks, the first of
    which counts requests; `written`: their form in `--models`.
    """

    platform: ClassVar[str] = "ensemble"
    """Triton's word for a model that is made of others."""
    task: ClassVar[str] = ""
    """Task of its answers; "": that of its first model."""

    name: str
    models: tuple[str, ...]
    written: tuple[str, ...]

    def check(self, models: Mapping[str, Model]) -> None:  # noqa: B027 - most have nothing to say
        """Raise ModelError for models that do not fit together."""

    @abstractmethod
    async def predict(self, request: CascadeRequest, options: Options) -> list[dict[str, Any]]:
        """Return the entry of "predictions" of each image."""


@cache
def kinds() -> Mapping[str, EntryPoint]:
    """Return the cascades of installed packages, by the words that name them in `--models`."""
    return {entry.name: entry for entry in entry_points(GROUP)}


@cache
def made(text: str) -> Cascade:
    """Build the cascade that an entry names. Raises ModelError."""
    name, _, rest = text.partition("=")
    kind, _, rest = rest.partition(":")
    try:
        cascade = kinds()[kind.strip()].load()(name.strip(), rest.strip())
        if not isinstance(cascade, Cascade):
            raise TypeError(f"{kind} makes no models.contract.cascade.Cascade")
    except ModelError:
        raise
    except Exception as error:  # The code of another package must not end the service.
        raise ModelError(f"{text!r} cannot be served: {reason_of(error)}.") from error
    return cascade
