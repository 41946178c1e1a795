"""Tasks that other packages bring, through the entry-point group `anychip.tasks` (docs/your-network.md).

    best.json {"task": "gaze"} ─► the entry point `gaze` ─► TaskAdapter ─► AdaptedModel

Owns: that contract and finding the class. The adapter's code runs in the server (what it makes of outputs) and in
decoder processes (how an image is placed); it must import no vendor's package.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from models.contract.errors import WeightsError
from models.contract.model import Array, Options, Placement

GROUP = "anychip.tasks"


@dataclass(frozen=True)
class AdaptedFile:
    """What is known of a file. `size`: height and width of its input; `shapes`: of its outputs, for a batch of one;
    `options`: what the sidecar says under that name, as JSON.
    """

    size: tuple[int, int]
    labels: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    options: str = "{}"

    def option(self, name: str, default: Any = None) -> Any:
        """One of the sidecar's options."""
        found: Mapping[str, Any] = json.loads(self.options)
        return found.get(name, default)


class TaskAdapter(ABC):
    """A task: made once a process for each file of it, and used by several threads."""

    def __init__(self, file: AdaptedFile) -> None:
        """Raise ValueError, with a sentence, for a file that is none of this task: the service then does not start."""
        self.file = file

    def place(self, image: Array, out: Array, width: int, height: int) -> Placement | None:
        """Place an image, uint8 [h, w, 3], in the network's input `out`, uint8 [height, width, 3], all of it.

        `width` and `height`: the image's displayed size. None, as here: the usual way, by the sidecar's `resize`.
        """
        return None

    def reduce(self, outputs: Sequence[Array], options: Options) -> tuple[Array, ...]:
        """In the worker: what of one image's outputs is worth sending to the server; all of it, as here."""
        return tuple(outputs)

    @abstractmethod
    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> Mapping[str, Any]:
        """In the server: what `reduce` returned -> the entry of "predictions", as JSON takes it. A pure function."""


def adapter_names() -> list[str]:
    """Tasks that are installed."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


@lru_cache(maxsize=64)
def made(name: str, file: AdaptedFile) -> TaskAdapter:
    """The adapter of a task for a file. Raises WeightsError."""
    found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if not found:
        raise WeightsError(f"no installed package brings the task {name!r}; there is {', '.join(adapter_names())}.")
    try:
        adapter = found[0].load()(file)
        if not isinstance(adapter, TaskAdapter):
            raise TypeError(f"{found[0].value} makes no models.contract.task_adapter.TaskAdapter")
    except Exception as error:  # The code of another package must not end the service.
        line = next((each for each in str(error).splitlines() if each.strip()), type(error).__name__)
        raise WeightsError(f"the task {name!r} cannot use this file: {line.rstrip('.')}.") from error
    return adapter
