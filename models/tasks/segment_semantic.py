"""Semantic segmentation: the class of each pixel.

Owns: turning scores into classes, the answer's form, and the precision gate's measures of it. Must not know networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from models.contract.measures import Limits, scale_error
from models.contract.model import Array, Options, OutputSpec, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter
from models.tasks.instances import mask_reduction
from models.tasks.mask_forms import grey_png, written

if TYPE_CHECKING:
    from torch import Tensor

_LIMITS: Limits = {
    "fp32": {"class": 0.0, "different": 0.002, "score": 0.001, "scale": 0.002},
    "fp16": {"class": 0.0005, "different": 0.01, "score": 0.005, "scale": 0.005},
    "bf16": {"class": 0.01, "different": 0.05, "score": 0.02, "scale": 0.02},
    "int8": {"class": 0.02, "different": 0.1, "score": 0.04, "scale": 0.04},
}
_SURE = 0.55  # Probability of a sure class: no other is within a tenth.
_FEW = 256  # Classes that a byte can tell apart.


class SegmentSemantic(TaskAdapter):
    """Semantic segmentation from the first output: scores [n, classes, h, w], or [n, 1, h, w] of the only class beside
    the background, or the classes themselves, [n, h, w].

    Options: `scores`, `logits` or `probabilities`.
    """

    resize = "stretch"
    known_options = ("scores",)
    offloaded = True  # The map is brought to the image's size.
    limits = _LIMITS
    outputs = ("classes", "scores")
    """`classes` and `scores`, [n, h, w] of the input's size."""

    def __init__(self, file: AdaptedFile) -> None:
        """Raise ValueError if the output is none of these, or of another number of classes."""
        super().__init__(file)
        shape = file.shapes[0]
        if len(shape) not in (3, 4):
            raise ValueError(
                f"a network of semantic segmentation has an output [n, classes, h, w] or [n, h, w], not {list(shape)}"
            )
        self.channels = shape[1] if len(shape) == 4 else 0
        count = max(self.channels, 2) if self.channels else max(len(file.labels), 1)
        names = file.labels
        if self.channels == 1 and len(names) == 1:
            names = ("background", *names)
        if names and len(names) != count:
            raise ValueError(f"it has {count} classes, and there are {len(names)} labels for them")
        self.names = names
        self.size = file.size if self.channels else shape[1:]
        self.dtype = np.dtype(np.uint8 if self.channels and count <= _FEW else np.uint16)

    def compute(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute each pixel's class, int32 [n, h, w], and its probability, for the precision gate.

        Scores are resized to the input before the best is chosen, as libraries do.
        """
        import torch
        from torch.nn import functional

        scores = outputs[0].float()
        if not self.channels:
            return scores.int(), torch.ones_like(scores)
        probabilities = scores
        if self.file.option("scores") != "probabilities":
            probabilities = scores.sigmoid() if self.channels == 1 else scores.softmax(dim=1)
        if self.channels == 1:
            scores = probabilities = torch.cat((1 - probabilities, probabilities), dim=1)
        best = probabilities.amax(dim=1, keepdim=True)
        if tuple(scores.shape[2:]) != self.size:
            scores, best = (
                functional.interpolate(each, self.size, mode="bilinear", align_corners=False) for each in (scores, best)
            )
        return scores.argmax(dim=1).int(), best[:, 0].contiguous()

    def reduce(self, outputs: Sequence[Array], options: Options) -> tuple[Array, ...]:
        """Return the classes alone."""
        return (outputs[0].astype(self.dtype),)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Return `areas` of the classes present, the largest first, and a map of them in the form of `masks`.

        The map has the image's size, reduced if a side is longer than 1,280 pixels. `polygon`, the default, means
        `png`: outlines would hide what they surround.
        """
        width, height = placement.width, placement.height
        factor = mask_reduction(width, height)
        size = max(1, round(width * factor)), max(1, round(height * factor))
        seen = np.ascontiguousarray(self.file.resize.fit(placement).seen(outputs[0]))
        classes = cv2.resize(seen, size, interpolation=cv2.INTER_NEAREST_EXACT)
        counts = np.bincount(classes.ravel())
        areas = [
            {
                "label": self.names[class_id] if class_id < len(self.names) else self.file.label(class_id),
                "class_id": class_id,
                "area": round(int(counts[class_id]) / classes.size * width * height),
                "share": round(int(counts[class_id]) / classes.size, 5),
            }
            for class_id in sorted(np.flatnonzero(counts).tolist(), key=lambda each: -counts[each])
        ]
        if options.masks == "rle":
            parts = (((classes == each["class_id"]).view(np.uint8), 0, 0) for each in areas)
            return {"areas": [{**a, "mask": m} for a, m in zip(areas, written("rle", parts, *size), strict=True)]}
        if options.masks == "none":
            return {"areas": areas}
        return {"areas": areas, "class_map": {"size": [size[1], size[0]], "png": grey_png(classes)}}

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Tensor of each pixel's class, for the whole input with its padding beside the image."""
        return (OutputSpec("class_map", "UINT8" if self.dtype == np.uint8 else "UINT16", (-1, *self.size)),)

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """Return `class_map`, [h, w]."""
        return {"class_map": outputs[0]}

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute `class`, the share of pixels of another class among those where the reference is sure; `different`,
        the same of all pixels, where those between two classes may be either; `score`, the mean error of a pixel's
        probability; `scale`, how far the best common factor of these is from 1.
        """
        (classes, scores), (given, their) = expected, outputs
        wrong, sure = classes != given, scores >= _SURE
        scores, their = scores.astype(np.float64), their.astype(np.float64)
        return {
            "class": float((wrong & sure).sum() / max(1, sure.sum())),
            "different": float(wrong.mean()),
            "score": float(np.abs(scores - their).mean()),
            "scale": scale_error(scores, their),
        }
