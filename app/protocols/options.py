"""The parameters of a prediction: one row each.

Owns: names, ranges and texts, of which the parser (app.protocols.parameters), the API's description, the options of
`anychip predict` and the table in docs/api.md are made. Defaults are those of models.Options. Must not import models:
the command line reads the rows before it loads PyTorch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Parameter(NamedTuple):
    """A parameter: what it is called, what it does, and its range, both ends included."""

    name: str
    kind: Literal["integer", "number", "string"]
    text: str
    low: float = 0
    high: float = 1


OPTIONS = (
    Parameter("top_k", "integer", "classes to answer with", 1, 100_000),
    Parameter("score_threshold", "number", "least score of a box"),
    Parameter("iou_threshold", "number", "boxes of one class that overlap more than this are one box"),
    Parameter("max_detections", "integer", "most boxes to answer with", 1, 30_000),
    Parameter("masks", "string", "form of masks"),
)
"""The fields of models.Options, in their order."""
