"""The parameters of a request, one row each: of them the parser, the API's description and docs/api.md are made.

Owns: which names mean one of them. Must not import models: the command line reads the rows before it loads PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from app.errors import invalid_request


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
    Parameter("min_area", "number", "least area in pixels of the boxes that max_detections leaves", 0, 0, 1e9),
    Parameter("normalize", "string", "norm by which an embedding is divided", "none", choices=("none", "l2")),
    Parameter("encoding", "string", "form of embeddings and depth maps", "auto", choices=("auto", "base64")),
    Parameter("masks", "string", "form of masks", "polygon", choices=("polygon", "rle", "png", "none")),
)
"""The fields of models.Options, in their order."""

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

PRIORITY = Parameter("priority", "integer", "from 1, the highest; 2 is normal, and so is 0", 0, 0, 102)
NORMAL_PRIORITY = 2
"""Normal priority of the protocol, which counts from 1, the highest; ours is 0 normally: its 1 is our 1, its 2 is 0."""
TIMEOUT_US = Parameter("timeout", "integer", "deadline, in microseconds; 0: the service's own", 0, 0, 10**12)
CLASSIFICATION = Parameter("classification", "integer", "top-k as labels; 0: the raw tensor", 0, 0, 100_000)
"""Parameter of the Open Inference Protocol, like the two above, in a request's or an output's `parameters`."""
INFER = (PRIORITY, TIMEOUT_US, *OPTIONS)

_OTHER_NAMES = {
    "score_threshold": ("threshold", "conf", "conf_threshold", "min_conf", "min_score"),
    "iou_threshold": ("iou", "nms", "nms_threshold", "overlap_threshold"),
    "top_k": ("k", "n", "top", "top_n", "num_classes"),
    "max_detections": ("max", "limit", "max_det", "max_boxes"),
    "timeout_ms": ("timeout", "deadline", "deadline_ms"),
}
"""Names of our parameters in other servers and libraries."""
_LONGEST_NAME, _MOST_NAMES = 24, 64
"""Longest name, and most of them, that are compared with ours: one may cost the event loop a tenth of a millisecond."""
_PLACES = dict.fromkeys(("tile", "overlap", "version"), "query of :predict") | {"timeout_ms": "header X-Timeout-Ms"}


def _plain(name: str) -> str:
    """Make one word of a name: for conf_threshold others write confidenceThreshold, conf-thresh and conf_thr."""
    return re.sub("thr(es(h(old)?)?)?$", "threshold", re.sub("[-_]|idence", "", name.lower()))


_MEANINGS = {_plain(name): row.name for row in QUERY for name in (row.name, *_OTHER_NAMES.get(row.name, ()))}
_NEAR = [row.name for row in QUERY if row not in (TILE, OVERLAP)]  # Those are like other words: title, overlay.


@lru_cache(maxsize=256)
def _meaning(name: str) -> str:
    """Return the parameter of ours that a name means, misspelt or in others' words; "" if it means none."""
    # Names of the protocols' own parameters are less like ours.
    return _MEANINGS.get(_plain(name)) or "".join(get_close_matches(name.lower(), _NEAR, 1, 0.85))


def check_names(names: Iterable[str], rows: Iterable[Parameter] = (), place: str = "request's parameters") -> None:
    """Raise INVALID_REQUEST for a name that means a parameter of ours and is none of the rows; `place`: of options."""
    distinct = dict.fromkeys(names)
    known = [row.name for row in rows] if distinct else []
    if len(distinct) > _MOST_NAMES:
        raise invalid_request(f"{len(distinct)} parameters are more than the {_MOST_NAMES} a request may name")
    for name in distinct:
        meaning = "" if name in known or len(name) > _LONGEST_NAME else _meaning(name)
        if meaning in known:
            raise invalid_request(f"there is no parameter {name!r} here; did you mean {meaning}?")
        if meaning:
            raise invalid_request(f"{name!r} is not read here; {meaning} belongs in the {_PLACES.get(meaning, place)}")
