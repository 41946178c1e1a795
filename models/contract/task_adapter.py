"""Tasks: what becomes of a network's outputs. Ours and those of other packages fulfil the same contract.

    best.json {"task": "gaze"} ─► the entry point `gaze` ─► TaskAdapter, around which PixelModel is a model

Owns: that contract and finding the class, in `OWN` or in the entry-point group `anychip.tasks` (docs/own-tasks.md).
A task's code runs in the server (what it makes of outputs), in workers (what it keeps of them) and in decoder processes
(how an image is placed); it must import no vendor's package,
and torch only where it computes: the server has none.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from models.contract.errors import WeightsError, reason_of
from models.contract.measures import TENSOR_LIMITS, Accuracy, Limits, of_tensors
from models.contract.model import Array, Finds, Options, OutputSpec, Placement
from models.contract.resize import Resize, ResizeHow

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "anychip.tasks"
OWN = tuple(
    EntryPoint(name, f"models.tasks.{name}:{attribute}", GROUP)
    for name, attribute in (
        ("classify", "Classify"),
        ("detect", "Detect"),
        ("segment", "Segment"),
        ("pose", "Pose"),
        ("obb", "TurnedBoxes"),
        ("embed", "Embed"),
        ("segment_semantic", "SegmentSemantic"),
        ("depth", "DepthEstimation"),
        ("regress", "Regress"),
    )
)
"""The tasks that come with anychip."""

Takes = Literal["outputs", "classes", "boxes", "masks", "keypoints", "turned"]
"""What the device makes of a file's outputs, whatever their layout, before a task has them; a is for candidates.

`outputs`: nothing, they are as the file has them. `classes`: logits [n, classes]. `boxes`: boxes [n, a, 4] as x1, y1,
x2, y2 in pixels of the input, scores [n, a], classes int32 [n, a]. `masks`: these, coefficients [n, a, m] and
prototypes [n, m, h, w]. `keypoints`: these boxes, and the values of all key points [n, a, k]. `turned`: boxes as centre
x, y, width and height, and angles [n, a, 1].
"""


@dataclass(frozen=True)
class AdaptedFile:
    """What is known of a file. `resize`: how images come into its input; `shapes`: of its outputs, for a batch of one,
    as the file has them; `options`: what the sidecar says under that name, and `stated`: what the file says of itself,
    both as JSON. `grey`: images are made grey before they are resized.

    Of candidates: `suppressed`, whether the network has done its own suppression; `strides` of their anchors, row by
    row, where these are known; `distances`, whether boxes are left, top, right and bottom from the anchor, in strides.
    """

    resize: Resize
    labels: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    options: str = "{}"
    stated: str = "{}"
    suppressed: bool = False
    strides: tuple[int, ...] = ()
    distances: bool = False
    grey: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the input."""
        return self.resize.size

    def option(self, name: str, default: Any = None) -> Any:
        """One of the sidecar's options."""
        found: Mapping[str, Any] = json.loads(self.options)
        return found.get(name, default)

    def metadata(self, name: str) -> str:
        """A text that the exporter wrote into the file, "" where there is none of this name."""
        found: Mapping[str, str] = json.loads(self.stated)
        return found.get(name, "")

    def label(self, class_id: int) -> str:
        """The label of a class, which a network may also number beyond its labels."""
        return self.labels[class_id] if 0 <= class_id < len(self.labels) else f"class {class_id}"

    def __hash__(self) -> int:
        return hash((self.size, self.shapes, self.options, len(self.labels)))  # A thousand labels take longer.


class TaskAdapter(ABC):
    """A task: made once a process for each file of it, and used by several threads.

    `finds`: what entries of answers have; `takes`: what `reduce` is given; `tiled`: whether large images may be looked
    at in tiles, of which `moved` moves what was found; `limits`: the largest error of each of `measures`, by precision;
    `accuracy`: how right answers are, None where that cannot be said: the task is not served in int8 then.

    `resize`: of tasks that come with anychip and take `outputs`, how an image comes into the input where nobody says;
    `known_options`: the names that the sidecar's `options` may have, None: any; `offloaded`: whether `postprocess` may
    take long though little was sent.
    """

    finds: ClassVar[Finds] = "other"
    takes: ClassVar[Takes] = "outputs"
    tiled: ClassVar[bool] = False
    resize: ClassVar[ResizeHow] = "letterbox"
    known_options: ClassVar[Sequence[str] | None] = None
    offloaded: ClassVar[bool] = False
    limits: Limits = TENSOR_LIMITS
    accuracy: Accuracy | None = None

    def __init__(self, file: AdaptedFile) -> None:
        """Raise ValueError, with a sentence, for a file that is none of this task: the service then does not start."""
        self.file = file
        if self.known_options is not None and (unknown := json.loads(file.options).keys() - {*self.known_options}):
            known = ", ".join(self.known_options) or "none"
            raise ValueError(f"there is no option {min(unknown)!r} of it; there is {known}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the network's outputs; by number, as here."""
        return tuple(f"output{number}" for number in range(len(self.file.shapes)))

    def place(self, image: Array, out: Array, width: int, height: int) -> Placement | None:
        """Place an image, uint8 [h, w, 3], in the network's input `out`, uint8 [height, width, 3], all of it.

        `width` and `height`: the image's displayed size. None, as here: the usual way, by the sidecar's `resize`.
        """
        return None

    def compute(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """On the device, the last part of the network: what of a batch's outputs leaves it; all of it, as here."""
        return tuple(outputs)

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        """Those of a ladder of batch sizes that make sense; all of them, as here; never none."""
        return tuple(ladder)

    def probes(self) -> Sequence[Array]:
        """Images, uint8 [h, w, 3], on which the precision gate compares; none, as here: those that anychip brings."""
        return ()

    def reduce(self, outputs: Sequence[Array], options: Options) -> tuple[Array, ...]:
        """In the worker: what of one image's outputs is worth sending to the server; all of it, as here."""
        return tuple(outputs)

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Options]) -> list[tuple[Array, ...]]:
        """The same of the first images of a batch, as many as there are `options`; one after the other, as here."""
        return [owned(self.reduce([each[row] for each in outputs], one)) for row, one in enumerate(options)]

    @abstractmethod
    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> Mapping[str, Any]:
        """In the server: what `reduce` returned -> the entry of "predictions", as JSON takes it. A pure function."""

    def postprocess_all(
        self, outputs: Sequence[Sequence[Array]], placements: Sequence[Placement], options: Options
    ) -> list[Mapping[str, Any]]:
        """The same of several images, where that takes less time than one after the other, as here."""
        return [self.postprocess(*each, options) for each in zip(outputs, placements, strict=True)]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """The tensors that `tensors` returns, of a batch; none, as here: the Open Inference Protocol has JSON alone."""
        return ()

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """In the server: what `reduce` returned, asked for `Options.tensors` -> the answer as tensors of one image, by
        the names of `answers`.
        """
        return {}

    def moved(self, entry: Mapping[str, Any], x: int, y: int) -> dict[str, Any]:
        """One of the `detections` in a tile that begins at (x, y) of the whole image, moved there: its box, as here."""
        box = entry["box"]
        corners = {"x1": box["x1"] + x, "y1": box["y1"] + y, "x2": box["x2"] + x, "y2": box["y2"] + y}
        return {**entry, "box": {name: round(place, 2) for name, place in corners.items()}}

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Errors by name of outputs, each [n, …], against the reference's of the same shapes: 0 is perfect.

        Of the numbers themselves, as here. The precision gate compares them with `limits`.
        """
        return of_tensors(expected, outputs)


def owned(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The arrays, none of them a view of a batch's outputs."""
    return tuple(each if each.flags.owndata else np.array(each) for each in arrays)


def task_names() -> list[str]:
    """Ours, and those of installed packages."""
    names = [entry.name for entry in OWN]
    return [*names, *sorted({entry.name for entry in entry_points(group=GROUP)} - {*names})]


@lru_cache(maxsize=64)
def task_class(name: str) -> type[TaskAdapter]:
    """The class of a task. Raises WeightsError."""
    own = [entry for entry in OWN if entry.name == name]
    found = own or [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if not found:
        raise WeightsError(f"no installed package brings the task {name!r}; there is {', '.join(task_names())}.")
    try:
        loaded = found[0].load()
        if not (isinstance(loaded, type) and issubclass(loaded, TaskAdapter)):
            raise TypeError(f"{found[0].value} is no models.contract.task_adapter.TaskAdapter")
    except Exception as error:  # The code of another package must not end the service.
        raise WeightsError(f"the task {name!r} cannot be used: {reason_of(error)}.") from error
    return loaded


@lru_cache(maxsize=64)
def made(name: str, file: AdaptedFile) -> TaskAdapter:
    """The adapter of a task for a file. Raises WeightsError."""
    try:
        return task_class(name)(file)
    except WeightsError:
        raise
    except Exception as error:  # The code of another package must not end the service.
        raise WeightsError(f"the task {name!r} cannot use this file: {reason_of(error)}.") from error
