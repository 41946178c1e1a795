"""Embeddings: one vector an image, for comparing images.

Owns: the choice of the output with the vector, the pooling of tokens or places, and the answer's form. Must not know
networks.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from models.contract.model import Array, Options, OutputSpec, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter

if TYPE_CHECKING:
    from torch import Tensor

_POOLED = {0: ("",), 3: ("cls", "mean"), 4: ("mean",)}
"""Allowed poolings of an output by its number of axes; 0: it is a vector already."""


class Embed(TaskAdapter):
    """Embedding: an output [n, d], or one of tokens [n, tokens, d] or places [n, d, h, w] pooled on the device.

    Options: `output`, its number, and `pooling`: `cls`, the first token, or `mean`.
    """

    resize = "centre"
    known_options = ("output", "pooling")
    outputs = ("embedding",)
    """`embedding`, [n, d]."""

    def __init__(self, file: AdaptedFile) -> None:
        """Raise ValueError if the output or its pooling does not fit."""
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
        """Return the vector, float32 [n, d]."""
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
        """Tensor of the vector."""
        return (OutputSpec("embedding", "FP32", (-1, self.dimensions)),)

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """Return `embedding`, float32 [d]."""
        return {"embedding": _divided(outputs[0], options)}


def _divided(vector: Array, options: Options) -> Array:
    """Divide a vector by its norm if asked for; a vector of zeros stays one."""
    norm = float(np.linalg.norm(vector.astype(np.float64))) if options.normalize == "l2" else 1.0
    found: Array = (vector / (norm or 1.0)).astype(np.float32)
    return found
