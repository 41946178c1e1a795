"""Detection: instances with a box, a score and a class; the other tasks of instances add to it.

Owns: what a task of instances says of itself, and where an image lies in a network's input. Must not know how a network
is stored or how its outputs became boxes (models.exports.layouts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.contract.model import Array, Options, OutputSpec, Placement, Task
from models.tasks.instances import suppress

Found = dict[str, Array]
"""Instances of an image: `boxes` float64 [k, 4] in its pixels, `scores`, `classes`, and what the task adds."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Where an image lies in the network's input. Pairs are of x and y.

    `scale`: pixels of the input for one of the image; `pad`: where its first pixel lies; `size`: height and width of
    the input.
    """

    placement: Placement
    scale: Array
    pad: Array
    size: tuple[int, int]

    def boxes(self, boxes: Array) -> Array:
        """Boxes [k, 4] of the input, in pixels of the image and within it."""
        limit = [self.placement.width, self.placement.height] * 2
        found: Array = ((boxes - np.tile(self.pad, 2)) / np.tile(self.scale, 2)).clip(0, limit)
        return found

    def points(self, points: Array) -> Array:
        """Points [..., 2] of the input, in pixels of the image and within it."""
        limit = [self.placement.width, self.placement.height]
        found: Array = ((points - self.pad) / self.scale).clip(0, limit)
        return found


class InstanceTask:
    """A task of instances: made once a model, pure, and used by several threads.

    `outputs`: names of the network's outputs beside boxes, scores and classes. `turned`: boxes are centre, width and
    height, and have an angle. `has_prototypes`: one output is of the whole image.
    """

    name: Task = "detect"
    outputs: tuple[str, ...] = ()
    turned = False
    has_prototypes = False

    def __init__(self, keypoints: tuple[int, int] | None = None) -> None:
        """`keypoints`: their number and the values of each, of poses."""
        self.keypoints = keypoints

    @classmethod
    def columns(cls, keypoints: tuple[int, int] | None, prototypes: Sequence[int]) -> int:
        """Numbers that each candidate has beside box and classes. `prototypes`: the shape of that output.

        Raises ValueError with what is missing, as the beginning of a sentence.
        """
        return 0

    def keep(self, outputs: Sequence[Array], options: Options) -> Array:
        """Indices of the candidates that remain, by descending score; `outputs` are by descending score."""
        boxes, scores, classes = outputs[:3]
        return suppress(boxes, scores, classes, options.iou_threshold, options.max_detections)

    def reduce(self, others: Sequence[Array], chosen: Array) -> list[Array]:
        """What is sent to the server of an image's further outputs, for the chosen candidates."""
        return [other[chosen] for other in others[:1]] if self.outputs else []

    def locate(self, outputs: Sequence[Array], kept: Array, frame: Fit) -> Found:
        """The boxes of the instances that were kept, and what the task adds."""
        return {"boxes": frame.boxes(outputs[0][kept].astype(np.float64))}

    def describe(self, found: Found, frame: Fit, options: Options) -> Sequence[Mapping[str, Any] | None]:
        """What each instance's entry has beside label, score and box; None: it is no instance after all."""
        return [{} for _ in found["scores"]]

    def specs(self, size: tuple[int, int]) -> tuple[OutputSpec, ...]:
        """The tensors of the answer that the task adds; `size`: height and width of the input."""
        return ()

    def tensors(self, found: Found, boxes: Array, size: tuple[int, int]) -> dict[str, Array]:
        """These tensors. `boxes`: of the instances, in pixels of the input of this `size`."""
        return {}
