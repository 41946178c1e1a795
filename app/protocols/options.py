"""The parameters of a request, one row each: of them the parser, the API's description and docs/api.md are made.

Must not import models: the command line reads the rows before it loads PyTorch.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Parameter(NamedTuple):
    """A parameter: its name, its text, its default and its range, both ends included.

    `default` None: the service's own setting. `or_zero`: 0 is allowed, too. `choices`: all values of a string.
    """

    name: str
    kind: Literal["integer", "number", "string"]
    text: str
    default: Any = None
    low: float = 0
    high: float = 1
    or_zero: bool = False
    choices: tuple[str, ...] = ()
    place: Literal["query", "header"] = "query"

    @property
    def schema(self) -> dict[str, Any]:
        """Its values in OpenAPI's form."""
        limits: dict[str, Any] = {} if self.kind == "string" else {"minimum": self.low, "maximum": self.high}
        if self.choices:
            limits = {"enum": list(self.choices)}
        elif self.or_zero:
            # Each with its type: else generated clients take it for anything.
            return {"anyOf": [{"type": self.kind, **limits}, {"type": self.kind, "const": 0}]}
        return {"type": self.kind, **limits} | ({} if self.default is None else {"default": self.default})

    def described(self) -> dict[str, Any]:
        """Describe the parameter in OpenAPI's form."""
        return {"name": self.name, "in": self.place, "description": self.text, "schema": self.schema}


OPTIONS = (
    Parameter("top_k", "integer", "classes to answer with", 5, 1, 100_000),
    Parameter("score_threshold", "number", "least score of a box", 0.25),
    Parameter("iou_threshold", "number", "boxes of one class that overlap more than this are one box", 0.7),
    Parameter("max_detections", "integer", "most boxes to answer with", 300, 1, 30_000),
    Parameter("min_area", "number", "least area of a box in pixels of the image; smaller ones are left out", 0, 0, 1e9),
    Parameter("normalize", "string", "norm by which an embedding is divided", "none", choices=("none", "l2")),
    Parameter("encoding", "string", "form of embeddings and depth maps", "auto", choices=("auto", "base64")),
    Parameter("masks", "string", "form of masks", "polygon", choices=("polygon", "rle", "png", "none")),
)
"""The fields of models.Options, in their order."""
OPTION_NAMES = tuple(row.name for row in OPTIONS)

TILE = Parameter(
    "tile", "integer", "look at the image in tiles of so many pixels, too; 0: do not", None, 32, 100_000, or_zero=True
)
OVERLAP = Parameter("overlap", "number", "share of a tile that its neighbour has, too", 0.2, 0, 0.9)
TIMEOUT_MS = Parameter(
    "timeout_ms", "number", "deadline, in milliseconds from the first byte of the request", None, 1e-3, 1e9
)
VERSION = Parameter("version", "string", "version of the model; where none is given, as --traffic says")
X_TIMEOUT_MS = TIMEOUT_MS._replace(name="X-Timeout-Ms", place="header", text="the same as `timeout_ms`, which wins")
X_PRIORITY = Parameter("X-Priority", "integer", "0 is normal, higher goes first", 0, -100, 100, place="header")
QUERY = (*OPTIONS, TILE, OVERLAP, VERSION, TIMEOUT_MS)
PREDICT = (*QUERY, X_TIMEOUT_MS, X_PRIORITY)
"""Parameters of `:predict`."""

PRIORITY = Parameter("priority", "integer", "from 1, the highest; 2 is normal, and so is 0", 0, 0, 102)
NORMAL_PRIORITY = 2
"""Normal priority of the protocol, which counts from 1, the highest; ours is 0 normally: its 1 is our 1, its 2 is 0."""
TIMEOUT_US = Parameter("timeout", "integer", "deadline, in microseconds; 0: the service's own", 0, 0, 10**12)
CLASSIFICATION = Parameter("classification", "integer", "top-k as labels; 0: the raw tensor", 0, 0, 100_000)
"""Parameter of the Open Inference Protocol, like the two above, in a request's or an output's `parameters`."""
