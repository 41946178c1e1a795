"""Models as data, for a process without torch: the parts of a model that answering requests needs.

    who reads files: Model ─► described ─► the server, which answers ─► a worker: the Model, where it is built

Owns: that form, and the key that identifies a network. Must not import torch, nor modules of models that do.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from app.processes.packing import packed, unpacked
from models import Model, PixelModel, TensorModel
from models.contract.files import digest_of_sources
from models.contract.measures import Limits
from models.contract.model import Array


@dataclass(frozen=True, kw_only=True)
class Described(Model):
    """Model as data. `key`: of `weights_key`; `more`: its other fields, as text; `written`: the model, packed."""

    key: str = field(compare=False)
    more: str
    written: bytes = field(compare=False, repr=False)

    @cached_property
    def original(self) -> Any:
        """Return the model itself; this imports torch."""
        return unpacked(self.written, memoryview(b""))

    @property
    def has_reference(self) -> bool:
        return bool(self.original.has_reference)

    @property
    def form(self) -> Any:
        return self.original.form

    def network(self) -> Any:
        return self.original.network()

    def network_of_shapes(self) -> Any:
        return self.original.network_of_shapes()

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.original.batch_sizes(ladder))


@dataclass(frozen=True)
class DescribedImages(Described, PixelModel):
    """Model of images as data."""

    @property
    def limits(self) -> Limits:
        limits: Limits = self.original.limits
        return limits


@dataclass(frozen=True, kw_only=True)
class DescribedTensors(Described, TensorModel):
    """Model of tensors as data. `called`: its platform."""

    called: str

    @property
    def platform(self) -> str:
        return self.called

    def probes(self) -> Array:
        found: Array = self.original.probes()
        return found


def described(model: Model) -> Described:
    """Return a model of our own as data."""
    base = PixelModel if isinstance(model, PixelModel) else TensorModel
    shared: dict[str, Any] = {each.name: getattr(model, each.name) for each in fields(base)}
    others = {
        each.name: getattr(model, each.name) for each in fields(model) if each.compare and each.name not in shared
    }
    about: dict[str, Any] = {
        "key": weights_key(model),
        "more": f"{type(model).__qualname__} {others}",
        "written": packed(model),
    }
    if isinstance(model, TensorModel):
        return DescribedTensors(**shared, **about, called=model.platform)
    return DescribedImages(**shared, **about)


def weights_key(model: Model) -> str:
    """Return a cache key that identifies a network: by the content of all its files and its declared properties.

    "" if there is no file.
    """
    if isinstance(model, Described):
        return model.key
    if model.files is None:
        return ""
    digests = [digest for _, digest in model.files.digests]
    stated: list[object] = [digest_of_sources("models")]
    if isinstance(model, TensorModel):  # The sidecar may declare other shapes for the same file.
        stated += [model.inputs, model.results, model.batched]
    # Size, mean, deviation and layout become part of an exported network, and its task.
    if isinstance(model, PixelModel) and hasattr(model, "export"):
        stated += [model.export, model.mean, model.std, model.input_shape, _source(type(model.adapter))]
    digest = hashlib.sha256(repr((digests, stated)).encode()).hexdigest()
    return f"{model.architecture}-{len(model.labels)}-{digest}"


@cache
def _source(task: type) -> str:
    return Path(inspect.getfile(task)).read_text(encoding="utf-8")
