"""Tensors and metadata for `YOLO("http://host:port/model")` of Ultralytics, a client of Triton. `--compat ultralytics`.

    their letterbox ─► FP32 [n, 3, h, w] in 0..1 ─► `input` ─► our model ─► `output0`: rows ─► their results

Owns: the tensors and the description that it reads, and the form of `output0`. Their client takes rows of an "end to
end" network, so that suppression is done here; all coordinates are pixels of the input that the client has made. Masks
are not offered: their form wants the network's own prototypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from app.config import Settings, split
from app.link import ServedModel
from app.protocols.tensors import INPUT
from models import Options, OutputSpec, PixelModel, Placement

Array = npt.NDArray[Any]

ROWS = "output0"
LEAST_SCORE = 0.001
"""Threshold if the request names none: the client has one of its own."""
_MOST_ROWS = 300
_STRIDE = 32


def is_offered(settings: Settings, served: ServedModel) -> bool:
    """Return True if the model's configuration is the one for this client."""
    model = served.model
    if "ultralytics" not in split(settings.compat) or served.floats is None or not isinstance(model, PixelModel):
        return False
    of_shares = set(model.mean) == {0.0} and set(model.std) == {1.0}  # The client sends pixels in 0..1.
    return model.finds != "other" and not _shape(model, "masks") and of_shares


def tensors_of(model: PixelModel) -> tuple[OutputSpec, OutputSpec]:
    """Return the one input and the one output that the client sees."""
    height, width, channels = model.input_shape
    columns = 6 + (1 if _shape(model, "turned") else 0) + 3 * _keypoints(model)
    row = (len(model.labels),) if model.finds == "classes" else (_MOST_ROWS, columns)
    return OutputSpec(INPUT, "FP32", (-1, channels, height, width)), OutputSpec(ROWS, "FP32", (-1, *row))


def rows(model: PixelModel, outputs: Sequence[Array], placement: Placement, options: Options) -> Array:
    """Return float32 [300, columns]: x1, y1, x2, y2, score, class and the task's own columns, then rows of 0. A
    classifier has the probabilities; turned boxes have centre, width and height, and the angle last.
    """
    found = model.tensors(outputs, placement, options)
    if model.finds == "classes":
        return found["probabilities"].astype(np.float32)
    boxes = found.get("turned", found["boxes"])
    parts = [boxes[:, :4], found["scores"][:, None], found["classes"][:, None], boxes[:, 4:]]
    if "keypoints" in found:
        parts.append(found["keypoints"].reshape(len(boxes), -1))
    filled = np.concatenate(parts, axis=1, dtype=np.float32)[:_MOST_ROWS]
    return np.pad(filled, ((0, _MOST_ROWS - len(filled)), (0, 0)))


def metadata(model: PixelModel) -> str:
    """Describe the model like Ultralytics' own exports; their client reads it as a literal of Python."""
    height, width, channels = model.input_shape
    about: dict[str, Any] = {
        "task": model.task,
        "stride": 1 if model.finds == "classes" else _STRIDE,
        "batch": 1,
        "imgsz": [height, width],
        "names": dict(enumerate(model.labels)),
        "channels": channels,
        "end2end": model.finds != "classes",
        "args": {"nms": False, "dynamic": False},
    }
    keypoints = _keypoints(model)
    return str(about | ({"kpt_shape": [keypoints, 3]} if keypoints else {}))


def _keypoints(model: PixelModel) -> int:
    shape = _shape(model, "keypoints")
    return shape[2] if shape else 0


def _shape(model: PixelModel, name: str) -> tuple[int, ...] | None:
    """Return the shape of one of the tensors of answers, None if there is none of this name."""
    return next((spec.shape for spec in model.answers if spec.name == name), None)
