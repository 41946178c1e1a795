"""Images of text for the precision gate, drawn with OpenCV's own strokes: no font is needed.

Owns: these images. Must not know their use.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from models.contract.model import Array

_TEXTS = (
    "Invoice 2031-07",
    "Total 1,482.90",
    "The quick brown fox",
    "over 300 lazy dogs",
    "Berlin / London",
    "No. 55-B (copy)",
    "Reference: QX 7741",
    "Net 30 days",
)
_PAPER, _INK = (244, 246, 250), (40, 30, 25)


def lines() -> Sequence[Array]:
    """Draw one line an image."""
    return [_drawn((44, 22 * len(text)), [(text, (8, 31))], 1.0) for text in _TEXTS]


def pages(height: int, width: int) -> Sequence[Array]:
    """Draw two pages that fill an input of this size, with lines in two columns, one of them turned."""
    rows = range(60, height - 40, 70)
    places = [(column, row) for row in rows for column in (40, width // 2)]
    upright = _drawn((height, width), [(_TEXTS[number % len(_TEXTS)], at) for number, at in enumerate(places)], 1.0)
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), 8, 1)
    return [upright, cv2.warpAffine(upright, turn, (width, height), borderValue=_PAPER)]


def _drawn(size: tuple[int, int], texts: Sequence[tuple[str, tuple[int, int]]], scale: float) -> Array:
    image = np.full((*size, 3), _PAPER, np.uint8)
    for text, at in texts:
        cv2.putText(image, text, at, cv2.FONT_HERSHEY_SIMPLEX, scale, _INK, 2, cv2.LINE_AA)
    return image
