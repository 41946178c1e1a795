"""Tasks about an image as a whole: an embedding, depth, numbers with names, the class of each pixel.

Owns: these tasks, their answers' forms, and the precision gate's measures of them. Must not know networks, nor what a
number of depth means: metres, or the inverse (some networks answer with it).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import orjson

from models.contract.measures import LEAST_SPREAD, Limits, divided, scale_error
from models.contract.model import Array, Options, OutputSpec, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter
from models.tasks.instances import grey_png, mask_reduction, written

if TYPE_CHECKING:
    from torch import Tensor


_LIMITS_OF_NUMBERS: Limits = {
    "fp32": {"value": 0.01, "scale": 0.002},
    "fp16": {"value": 0.05, "scale": 0.005},
    "bf16": {"value": 0.5, "scale": 0.02},
    "int8": {"value": 0.75, "scale": 0.04},
}
_LIMITS_OF_CLASSES: Limits = {
    "fp32": {"class": 0.0, "different": 0.002, "score": 0.001, "scale": 0.002},
    "fp16": {"class": 0.0005, "different": 0.01, "score": 0.005, "scale": 0.005},
    "bf16": {"class": 0.01, "different": 0.05, "score": 0.02, "scale": 0.02},
    "int8": {"class": 0.02, "different": 0.1, "score": 0.04, "scale": 0.04},
}

_GREATEST = 65_535  # Largest number of 16 bits.
_SURE = 0.55  # Probability of a sure class: no other is within a tenth.
_FEW = 256  # Classes that a byte can tell apart.
_POOLED = {0: ("",), 3: ("cls", "mean"), 4: ("mean",)}
"""Allowed poolings of an output by its number of axes; 0: it is a vector already."""


class Embed(TaskAdapter):
    """Embedding: an output [n, d], or one of tokens [n, tokens, d] or places [n, d, h, w] pooled on the device.

    Options: `output`, its number, and `pooling`: `cls`, the first token, or `mean`.
    """

    resize = "centre"
    known_options = ("output", "pooling")
    outputs = ("embedding",)

    def __init__(self, file: AdaptedFile) -> None:
        super().__init__(file)
        self.pooling = file.option("pooling")
        flat = [max(shape[2:], default=1) == 1 for shape in file.shapes]
        fitting = [number for number, is_flat in enumerate(flat) if is_flat == (self.pooling is None)]
        self.number = file.option("output", fitting[0] if fitting else 0)
        if not isinstance(self.number, int) or not 0 <= self.number < len(flat):
            raise ValueError(f"it has no output {self.number!r}; its outputs are {list(map(list, file.shapes))}")
        shape = file.shapes[self.number]
        allowed = _POOLED.get(0 if flat[self.number] else len(shape), ())
        if (self.pooling or "") not in allowed:
            wanted = f'"options": {{"pooling": …}} must be {" or ".join(allowed) or "left out"}'
            raise ValueError(f"its output {self.number} is {list(shape)}: {wanted}")
        self.dimensions = shape[2] if len(shape) == 3 and self.pooling else shape[1]

    def compute(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        chosen = outputs[self.number].float()
        if self.pooling is None:
            return (chosen.flatten(1),)
        if self.pooling == "cls":
            return (chosen[:, 0].contiguous(),)
        return (chosen.mean((2, 3) if chosen.dim() == 4 else 1),)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Return `embedding`: the numbers, or base64 of little-endian float32."""
        vector = _divided(outputs[0], options)
        if options.encoding == "base64":
            return {"embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")}
        # Parsed from its text, a number has only the few digits of float32.
        return {"embedding": orjson.loads(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))}

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        return (OutputSpec("embedding", "FP32", (-1, self.dimensions)),)

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        return {"embedding": _divided(outputs[0], options)}


def _divided(vector: Array, options: Options) -> Array:
    norm = float(np.linalg.norm(vector.astype(np.float64))) if options.normalize == "l2" else 1.0
    found: Array = (vector / (norm or 1.0)).astype(np.float32)
    return found


class DepthEstimation(TaskAdapter):
    """Depth from the first output, [n, h, w] or [n, 1, h, w]."""

    resize = "stretch"
    known_options = ()
    outputs = ("depth",)

    def __init__(self, file: AdaptedFile) -> None:
        super().__init__(file)
        shape = file.shapes[0]
        if len(shape) not in (3, 4) or shape[1:-2] not in ((), (1,)):
            raise ValueError(f"a network of depth has an output [n, h, w] or [n, 1, h, w], not {list(shape)}")
        self.height, self.width = shape[-2:]

    def compute(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (outputs[0].float().reshape(-1, self.height, self.width),)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Return `depth`: the size of the map of the image, its range, and the map as PNG or base64 of float32."""
        seen = self.file.resize.fit(placement).seen(outputs[0])
        low, high = float(seen.min()), float(seen.max())
        if options.encoding == "base64":
            form = {"float32": base64.b64encode(seen.astype("<f4").tobytes()).decode("ascii")}
        else:
            step = (high - low) / _GREATEST
            levels = ((seen - np.float64(low)) / (step or 1)).round().clip(0, _GREATEST)
            form = {"png": grey_png(levels.astype(np.uint16))}
        return {"depth": {"size": list(seen.shape), "min": low, "max": high, **form}}

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        # The whole map, with the input's padding beside the image.
        return (OutputSpec("depth", "FP32", (-1, self.height, self.width)),)


class Regress(TaskAdapter):
    """Regression: all numbers of all outputs, in their order; the labels are their names."""

    resize = "stretch"
    known_options = ()
    limits = _LIMITS_OF_NUMBERS
    outputs = ("values",)

    def __init__(self, file: AdaptedFile) -> None:
        super().__init__(file)
        count = sum(prod(shape[1:]) for shape in file.shapes)
        self.names = file.labels or (("value",) if count == 1 else tuple(f"value {n}" for n in range(count)))
        if len(self.names) != count:
            raise ValueError(f"it answers with {count} numbers, and there are {len(self.names)} labels for them")
        if len(set(self.names)) < count:
            twice = max(self.names, key=self.names.count)
            raise ValueError(f"it answers by label, and two numbers have the label {twice!r}: name each otherwise")

    def compute(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        import torch

        return (torch.cat([each.float().reshape(len(each), -1) for each in outputs], dim=1),)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        return {"values": {name: float(str(value)) for name, value in zip(self.names, outputs[0], strict=True)}}

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        return (OutputSpec("values", "FP32", (-1, len(self.names))),)

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        wanted, given = (each[0].astype(np.float64) for each in (expected, outputs))
        spread = np.maximum(wanted.std(0), LEAST_SPREAD * np.sqrt((wanted**2).mean(0)))
        wanted, given = divided(wanted, spread), divided(given, spread)
        return {"value": float(np.abs(wanted - given).max()), "scale": scale_error(wanted, given)}


class SegmentSemantic(TaskAdapter):
    """Semantic segmentation from the first output: scores [n, classes, h, w], or [n, 1, h, w] of the only class beside
    the background, or the classes themselves, [n, h, w].

    Options: `scores`, `logits` or `probabilities`.
    """

    resize = "stretch"
    known_options = ("scores",)
    offloaded = True  # The map is brought to the image's size.
    limits = _LIMITS_OF_CLASSES
    outputs = ("classes", "scores")  # [n, h, w] of the input's size.

    def __init__(self, file: AdaptedFile) -> None:
        super().__init__(file)
        shape = file.shapes[0]
        if len(shape) not in (3, 4):
            raise ValueError(f"semantic segmentation has outputs [n, classes, h, w] or [n, h, w], not {list(shape)}")
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
        nearest = cv2.INTER_NEAREST_EXACT if self.channels else cv2.INTER_NEAREST  # As libraries resize class numbers.
        classes = cv2.resize(seen, size, interpolation=nearest)
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
        # For the whole input, with its padding beside the image.
        return (OutputSpec("class_map", "UINT8" if self.dtype == np.uint8 else "UINT16", (-1, *self.size)),)

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        (classes, scores), (given, their) = expected, outputs
        wrong, sure = classes != given, scores >= _SURE
        scores, their = scores.astype(np.float64), their.astype(np.float64)
        return {
            "class": float((wrong & sure).sum() / max(1, sure.sum())),
            "different": float(wrong.mean()),
            "score": float(np.abs(scores - their).mean()),
            "scale": scale_error(scores, their),
        }
