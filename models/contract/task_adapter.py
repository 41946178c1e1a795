"""Tasks: postprocessing of a network's outputs. Ours and those of other packages fulfil the same contract.

    best.json {"task": "gaze"} ─► the entry point `gaze` ─► TaskAdapter, around which PixelModel is a model

The class is found in `OWN` or in the entry-point group `anychip.tasks` (docs/own-tasks.md). A task's code runs in the
server (postprocessing), in workers (reduction of outputs) and in decoder processes (placing an image). It must import
no vendor's package, and torch only for its computation: the server has none.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from anychip_base.extras import entry_points
from models.contract.errors import WeightsError, reason_of
from models.contract.measures import TENSOR_LIMITS, Accuracy, Limits, of_tensors
from models.contract.model import Array, Finds, Options, OutputSpec, Placement
from models.contract.resize import Resize, ResizeHow

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "anychip.tasks"
OWN = tuple(
    EntryPoint(name, f"models.tasks.{place}", GROUP)
    for name, place in (
        ("classify", "classify:Classify"),
        ("detect", "detect:Detect"),
        ("segment", "detect:Segment"),
        ("pose", "detect:Pose"),
        ("obb", "detect:TurnedBoxes"),
        ("embed", "whole_image:Embed"),
        ("segment_semantic", "whole_image:SegmentSemantic"),
        ("depth", "whole_image:DepthEstimation"),
        ("regress", "whole_image:Regress"),
    )
)

Takes = Literal["outputs", "classes", "boxes", "masks", "keypoints", "turned"]
"""Form in which a task receives a file's outputs; the device converts them from any layout. a: number of candidates.

`outputs`: unchanged, as the file has them. `classes`: logits [n, classes]. `boxes`: boxes [n, a, 4] as x1, y1, x2, y2
in pixels of the input, scores [n, a], classes int32 [n, a]. `masks`: these, coefficients [n, a, m] and prototypes [n,
m, h, w]. `keypoints`: these boxes, and the values of all key points [n, a, k]. `turned`: boxes as centre x, y, width
and height, and angles [n, a, 1].
"""


@dataclass(frozen=True)
class AdaptedFile:
    """Facts about a file. `resize`: the geometry of images in its input; `shapes`: of its outputs, for a batch of one,
    as the file has them; `options`: the sidecar's value of that name, and `stated`: the file's own metadata, both as
    JSON. `grey`: images are made grey before they are resized. For candidates: `suppressed`, whether the network has
    done its own suppression; `strides` of their anchors, row by row, if known; `distances`, whether boxes are left,
    top, right and bottom from the anchor, in strides.
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
        """Return one of the sidecar's options."""
        found: Mapping[str, Any] = json.loads(self.options)
        return found.get(name, default)

    def metadata(self, name: str) -> str:
        """Return a text that the exporter wrote into the file, "" if there is none of this name."""
        found: Mapping[str, str] = json.loads(self.stated)
        return found.get(name, "")

    def label(self, class_id: int) -> str:
        """Return the label of a class; a network may number classes beyond its labels."""
        return self.labels[class_id] if 0 <= class_id < len(self.labels) else f"class {class_id}"

    def __hash__(self) -> int:
        return hash((self.size, self.shapes, self.options, len(self.labels)))  # A thousand labels take longer.


class TaskAdapter(ABC):
    """A task: made once in each process for each of its files, and used by several threads.

    `finds`: content of the answers' entries; `takes`: form of the outputs for `reduce`; `tiled`: whether large images
    may be processed in tiles, whose detections `moved` shifts; `limits`: the largest error of each of `measures`, by
    precision; `accuracy`: the accuracy of answers, None if it has no measure; the task is not served in int8 then.

    `resize`: for anychip's own tasks that take `outputs`, the geometry if nobody states one; `known_options`: the
    allowed names in the sidecar's `options`, None: any; `offloaded`: whether `postprocess` may take long though little
    was sent.
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
        self.file = file
        if self.known_options is not None and (unknown := json.loads(file.options).keys() - {*self.known_options}):
            known = ", ".join(self.known_options) or "none"
            raise ValueError(f"there is no option {min(unknown)!r} of it; there is {known}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the network's outputs; by default their numbers."""
        return tuple(f"output{number}" for number in range(len(self.file.shapes)))

    def place(self, image: Array, out: Array, width: int, height: int) -> Placement | None:
        """Place an image, uint8 [h, w, 3], in the network's input `out`, uint8 [height, width, 3], all of it.

        `width` and `height`: the image's displayed size. The default, None: the usual way, by the sidecar's `resize`.
        """
        return None

    def compute(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute, on the device as the network's last part, the outputs that leave it; by default all of them."""
        return tuple(outputs)

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of a ladder of batch sizes that make sense; by default all; never none."""
        return tuple(ladder)

    def probes(self) -> Sequence[Array]:
        """Return images, uint8 [h, w, 3], for the precision gate; by default none: it takes anychip's own."""
        return ()

    def reduce(self, outputs: Sequence[Array], options: Options) -> tuple[Array, ...]:
        """Select, in the worker, the outputs of one image that the server needs; by default all."""
        return tuple(outputs)

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Options]) -> list[tuple[Array, ...]]:
        """Reduce the first images of a batch, one for each of `options`; by default one after the other."""
        return [owned(self.reduce([each[row] for each in outputs], one)) for row, one in enumerate(options)]

    @abstractmethod
    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> Mapping[str, Any]:
        """Turn, in the server, a result of `reduce` into the entry of "predictions", ready for JSON. Pure function."""

    def postprocess_all(
        self, outputs: Sequence[Sequence[Array]], placements: Sequence[Placement], options: Options
    ) -> list[Mapping[str, Any]]:
        """Postprocess several images, together if that is faster; by default one after the other."""
        return [self.postprocess(*each, options) for each in zip(outputs, placements, strict=True)]

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Tensors that `tensors` returns, of a batch; by default none: the Open Inference Protocol has JSON alone."""
        return ()

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """Turn, in the server, the result of `reduce` for `Options.tensors` into one image's answer as tensors, by the
        names of `answers`; by default these arrays, in this order.
        """
        return {spec.name: each for spec, each in zip(self.answers, outputs, strict=False)}

    def moved(self, entry: Mapping[str, Any], x: int, y: int) -> dict[str, Any]:
        """Move one of the `detections` in a tile that begins at (x, y) of the whole image there; by default its box."""
        box = entry["box"]
        corners = {"x1": box["x1"] + x, "y1": box["y1"] + y, "x2": box["x2"] + x, "y2": box["y2"] + y}
        return {**entry, "box": {name: round(place, 2) for name, place in corners.items()}}

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute errors by name of outputs, each [n, …], against the reference's of the same shapes: 0 is perfect.

        By default those of the numbers themselves. The precision gate compares them with `limits`.
        """
        return of_tensors(expected, outputs)


def owned(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Return the arrays, copying each view of a batch's outputs."""
    return tuple(each if each.flags.owndata else np.array(each) for each in arrays)


def task_names() -> list[str]:
    """Return the names of our tasks and of those in installed packages."""
    names = [entry.name for entry in OWN]
    return [*names, *sorted({entry.name for entry in entry_points(GROUP)} - {*names})]


@lru_cache(maxsize=64)
def task_class(name: str) -> type[TaskAdapter]:
    """Return the class of a task. Raises WeightsError."""
    own = [entry for entry in OWN if entry.name == name]
    found = own or [entry for entry in entry_points(GROUP) if entry.name == name]
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
    """Build the adapter of a task for a file. Raises WeightsError."""
    try:
        return task_class(name)(file)
    except WeightsError:
        raise
    except Exception as error:  # The code of another package must not end the service.
        raise WeightsError(f"the task {name!r} cannot use this file: {reason_of(error)}.") from error
