"""Metadata of PaddleOCR's exports: `inference.yml` beside `inference.onnx`, as PaddleX 3 writes it.

Owns: converting it to the sidecar of the network. Must not know sizes of inputs. PaddleX defines the steps
(paddlex/inference/models): detectors and recognisers see BGR, classifiers RGB in the input's whole size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.contract.errors import ModelError
from models.contract.plain_yaml import read_yaml
from models.contract.regular import read_regular

_PIXEL_SCALE = 1 / 255


def sidecar_beside(file: Path) -> dict[str, Any]:
    """Return entries of the network's sidecar; none if there is no `inference.yml`. Raises ModelError."""
    beside = file.with_name("inference.yml")
    content = read_regular(beside)
    if content is None:
        return {}
    try:
        document = read_yaml(content, texts=True, aliases=True)
        steps = {name: stated for step in document["PreProcess"]["transform_ops"] for name, stated in step.items()}
        return {
            **_normalised(steps.get("NormalizeImage")),
            **_resized(steps.get("ResizeImage")),
            "options": _options(document["PostProcess"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ModelError(f"{beside} is not understood: {line}.") from error


def _normalised(stated: Mapping[str, Any] | None) -> dict[str, list[float]]:
    if not stated:
        return {}
    over, _, under = stated["scale"].partition("/")
    if abs(float(over) / float(under or 1) - _PIXEL_SCALE) > _PIXEL_SCALE / 1000:
        raise ValueError(f"pixels are scaled by {stated['scale']}, and not by 1/255")
    return {name: [float(number) for number in stated[name]] for name in ("mean", "std")}


def _resized(stated: Mapping[str, Any] | None) -> dict[str, list[int]]:
    return {"size": [int(side) for side in reversed(stated["size"])]} if stated else {}


def _options(after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the network's task."""
    if after.get("name") == "CTCLabelDecode":
        return {"characters": list(after["character_dict"])}
    if after.get("name") == "DBPostProcess":
        named = {"pixel": "thresh", "box": "box_thresh", "unclip": "unclip_ratio"}
        found: dict[str, Any] = {ours: float(after[theirs]) for ours, theirs in named.items() if theirs in after}
        return {**found, "most": int(after["max_candidates"]), "dilate": after.get("use_dilation") == "true"}
    if "Topk" in after:
        return {"stretch": True}
    raise ValueError(f"no network of text says {', '.join(after)} of itself")
