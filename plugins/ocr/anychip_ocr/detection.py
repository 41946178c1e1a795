"""The task `text-detection`: a network's map of probabilities becomes quadrilaterals around lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from anychip_ocr.quadrilaterals import GREY, Thresholds, found_in, in_image, pages, reading_order
from models.contract.measures import Limits
from models.contract.model import Array, Options, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter

STEP = 32
"""Divisor of a network input's sides."""
_LEAST_SIDE, _MOST_SIDE = 736, 2000
_MOST_PIXELS = 5 << 20
_SAME_PIXELS = 3
"""Largest distance, in the input, of the corners of one box found twice."""


def fitted(width: int, height: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return width and height to which an image is resized for an input of `size` (height, width).

    PP-OCR's networks need a short side of 736 pixels or more; images over 2,000 are reduced to that size.
    """
    scale = max(1.0, _LEAST_SIDE / min(width, height))
    if max(width, height) > _MOST_SIDE:
        scale = _MOST_SIDE / max(width, height)
    scale = min(scale, size[0] / height, size[1] / width)
    across, down = (max(STEP, round(int(side * scale) / STEP) * STEP) for side in (width, height))
    return min(across, size[1]), min(down, size[0])


_LIMITS: Limits = {
    "fp32": {"missed": 0.0, "score": 0.01, "map": 0.01},
    "fp16": {"missed": 0.02, "score": 0.05, "map": 0.02},
    "bf16": {"missed": 0.05, "score": 0.15, "map": 0.04},
}


class TextDetection(TaskAdapter):
    """A network of Differentiable Binarization: one output [n, 1, height, width] from 0 to 1."""

    limits = _LIMITS

    def __init__(self, file: AdaptedFile) -> None:
        super().__init__(file)
        if file.shapes != ((1, 1, *file.size),):
            raise ValueError(f"a network that finds text has one output [n, 1, height, width], not {file.shapes}")
        given = {name: file.option(name) for name in ("pixel", "box", "unclip", "most", "dilate")}
        self.limits_of_text = Thresholds(**{name: value for name, value in given.items() if value is not None})

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes that keep a batch within some megapixels: each takes hundreds of megabytes."""
        pixels = self.file.size[0] * self.file.size[1]
        return tuple(size for size in ladder if size * pixels <= _MOST_PIXELS) or (min(ladder),)

    def probes(self) -> Sequence[Array]:
        return pages(*self.file.size)

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute `missed`, the share of boxes without one at the same place on the other side; `score`, the largest
        error of a box's score; `map`, the mean error of a probability, as a share of the text.
        """
        missed, found, worst = 0, 0, 0.0
        for one, other in zip(expected[0][:, 0], outputs[0][:, 0], strict=True):
            (quads, scores), (others, their) = found_in(one, self.limits_of_text), found_in(other, self.limits_of_text)
            found += len(quads) + len(others)
            if not len(quads) or not len(others):
                missed += len(quads) + len(others)
                continue
            far = np.abs(quads[:, None] - others[None]).max(axis=(2, 3))
            missed += int((far.min(axis=1) > _SAME_PIXELS).sum() + (far.min(axis=0) > _SAME_PIXELS).sum())
            same = far.min(axis=1) <= _SAME_PIXELS
            worst = max(worst, float(np.abs(scores - their[far.argmin(axis=1)])[same].max(initial=0.0)))
        text = float(expected[0].sum())
        error = float(np.abs(expected[0].astype(np.float64) - outputs[0]).sum())
        return {"missed": missed / max(1, found), "score": worst, "map": error / max(1.0, text)}

    def place(self, image: Array, out: Array, width: int, height: int) -> Placement:
        """Place the whole image at the upper left, in BGR, on which these networks are trained."""
        across, down = fitted(width, height, self.file.size)
        out[...] = GREY
        out[:down, :across] = cv2.resize(np.ascontiguousarray(image), (across, down))[..., ::-1]
        return Placement(width, height)

    def reduce(self, outputs: Sequence[Array], options: Options) -> tuple[Array, ...]:
        """Return quadrilaterals in pixels of the input, and their scores: some bytes in place of megabytes."""
        return found_in(outputs[0][0], self.limits_of_text)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> Mapping[str, Any]:
        quads, scores = outputs
        width, height = placement.width, placement.height
        across, down = fitted(width, height, self.file.size)
        points, large = in_image(quads, (across / width, down / height), width, height)
        order = np.flatnonzero(large)[reading_order(points[large])]
        lines = [
            {"score": score, "corners": corners}
            for score, corners in zip(scores[order].round(5).tolist(), points[order].tolist(), strict=True)
        ]
        return {"lines": lines}
