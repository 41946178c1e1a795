"""Cascade `ocr=ppocr:FOLDER`: finding lines of text, setting them upright and reading them, under one name.

All shapes are static: an image goes to the smallest of the detectors' inputs that holds it, a line to that of the
recognisers' widths. PaddleX 3 writes the `inference.yml`, and defines the steps (paddlex/inference/models): detectors
and recognisers see BGR, classifiers RGB in the input's whole size.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import parse_qsl, urlencode

import numpy as np

from anychip_ocr.detection import STEP, fitted
from anychip_ocr.quadrilaterals import bucket_of, cut_of, resized_width
from models.contract.cascade import Cascade, CascadeRequest, Region
from models.contract.errors import ModelError
from models.contract.files import read_regular, read_yaml
from models.contract.model import Options

Key = TypeVar("Key")

_LINE_HEIGHT = 48
_SIZES = ("960x1280", "1280x960")
_WIDTHS = ("320", "640", "1280", "2560")
_KINDS = {"detection": re.compile("det"), "recognition": re.compile("rec"), "direction": re.compile("cls|ori")}
_PIXEL_SCALE = 1 / 255
_NORMALISED = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}


class Ppocr(Cascade):
    """PP-OCR's cascade, written `name=ppocr:FOLDER?sizes=960x1280|1280x960&widths=320|640&min_score=0.5`."""

    task: ClassVar[str] = "read"

    def __init__(self, name: str, text: str) -> None:
        folder, _, query = text.partition("?")
        given = dict(parse_qsl(query))
        try:
            self.sizes = sorted(_sizes(given.pop("sizes", "|".join(_SIZES))), key=np.prod)
            self.widths = sorted(int(width) for width in given.pop("widths", "|".join(_WIDTHS)).split("|"))
            self.min_score = float(given.pop("min_score", 0.5))
        except ValueError as error:
            raise ModelError(f"the options of {name} are not understood: {error}.") from None
        if given:
            raise ModelError(f"{name} has an option {next(iter(given))!r}; there is sizes, widths and min_score.")
        files = _files(name, Path(folder).expanduser())
        self.detectors = {size: f"{name}.detect-{size[0]}x{size[1]}" for size in self.sizes}
        self.readers = {width: f"{name}.read-{width}" for width in self.widths}
        self.director = f"{name}.direction" if "direction" in files else None
        written = [
            _written(model, files["detection"], "text-detection", size) for size, model in self.detectors.items()
        ]
        if self.director:
            size = (80, 160) if "ori" in files["direction"].name else (_LINE_HEIGHT, 192)
            written.append(_written(self.director, files["direction"], "text-direction", size))
        written += [
            _written(model, files["recognition"], "text-recognition", (_LINE_HEIGHT, width))
            for width, model in self.readers.items()
        ]
        self.name, self.written = name, tuple(written)
        self.models = tuple(each.partition("=")[0] for each in written)

    async def predict(self, request: CascadeRequest, options: Options) -> list[dict[str, Any]]:
        """Return the lines of each image in reading order, with text, score and corners."""
        sizes = request.sizes()
        answers: list[dict[str, Any]] = [{} for _ in sizes]

        async def detect(model: str, numbers: Sequence[int]) -> None:
            whole = [(number, Region(0, 0, *sizes[number])) for number in numbers]
            for number, found in zip(numbers, await request.parts(model, whole), strict=True):
                answers[number] = found

        by_size = _grouped([self._size_for(*size) for size in sizes])
        await asyncio.gather(*(detect(self.detectors[size], numbers) for size, numbers in by_size.items()))
        lines = [(number, line) for number, found in enumerate(answers) for line in found["lines"]]
        parts = [(number, cut_of(np.array(line["corners"], np.float32))) for number, line in lines]
        if self.director and parts:
            directions = await request.parts(self.director, parts)
            for place, direction in enumerate(directions):
                if direction["turned"]:
                    number, region = parts[place]
                    parts[place] = number, region._replace(quarters=(region.quarters + 2) % 4)
        ratios = [width / height for _, region in parts for width, height in [region.size]]
        wide = [bucket_of(resized_width(ratio, _LINE_HEIGHT, 1 << 20), self.widths) for ratio in ratios]

        async def read(width: int, places: Sequence[int]) -> None:
            answers = await request.parts(self.readers[width], [parts[place] for place in places])
            for place, one in zip(places, answers, strict=True):
                lines[place][1].update(text=one["text"], score=one["score"])

        await asyncio.gather(*(read(width, places) for width, places in _grouped(wide).items()))
        least = max(self.min_score, options.score_threshold)
        for found in answers:
            found["lines"] = [
                {"text": line["text"], "score": line["score"], "corners": line["corners"]}
                for line in found["lines"]
                if line["text"].strip() and line["score"] >= least
            ]
        return answers

    def _size_for(self, width: int, height: int) -> tuple[int, int]:
        return max(self.sizes, key=lambda size: (np.prod(fitted(width, height, size)), -np.prod(size)))


def _grouped(keys: Sequence[Key]) -> Mapping[Key, list[int]]:
    places: dict[Key, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def _sizes(text: str) -> list[tuple[int, int]]:
    sizes = []
    for each in text.split("|"):
        height, _, width = each.partition("x")
        sizes.append((int(height), int(width or height)))
        if any(side % STEP or side < STEP for side in sizes[-1]):
            raise ValueError(f"{each} is no size: HEIGHTxWIDTH, both multiples of {STEP}")
    return sizes


def _files(name: str, folder: Path) -> Mapping[str, Path]:
    """Find the network of each kind in a folder by name: `…det….onnx`, or `…det…/inference.onnx`. Raises ModelError."""
    there = sorted(file for pattern in ("*.onnx", "*/*.onnx") for file in folder.glob(pattern))
    found = {}
    for kind, pattern in _KINDS.items():
        files = [file for file in there if pattern.search(str(file.relative_to(folder)).lower())]
        if len(files) > 1 or (not files and kind != "direction"):
            raise ModelError(
                f"{name} wants one network of {kind} in {folder}, named {pattern.pattern}; there is "
                f"{', '.join(file.name for file in files) or 'none'}."
            )
        if files:
            found[kind] = files[0]
    return found


def _written(name: str, file: Path, task: str, size: Sequence[int]) -> str:
    sidecar = {"task": task, "size": [*size], **_NORMALISED, **sidecar_beside(file)}
    return f"{name}={file}?{urlencode({key: json.dumps(value, ensure_ascii=False) for key, value in sidecar.items()})}"


def sidecar_beside(file: Path) -> dict[str, Any]:
    """Return entries of the network's sidecar; none if there is no `inference.yml`. Raises ModelError."""
    beside = file.with_name("inference.yml")
    content = read_regular(beside)
    if content is None:
        return {}
    try:
        document = read_yaml(content, texts=True, aliases=True)
        steps = {name: stated for step in document["PreProcess"]["transform_ops"] for name, stated in step.items()}
        resized = steps.get("ResizeImage")
        size = {"size": [int(side) for side in reversed(resized["size"])]} if resized else {}
        return {**_normalised(steps.get("NormalizeImage")), **size, "options": _options(document["PostProcess"])}
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


def _options(after: Mapping[str, Any]) -> dict[str, Any]:
    if after.get("name") == "CTCLabelDecode":
        return {"characters": list(after["character_dict"])}
    if after.get("name") == "DBPostProcess":
        named = {"pixel": "thresh", "box": "box_thresh", "unclip": "unclip_ratio"}
        found: dict[str, Any] = {ours: float(after[theirs]) for ours, theirs in named.items() if theirs in after}
        return {**found, "most": int(after["max_candidates"]), "dilate": after.get("use_dilation") == "true"}
    if "Topk" in after:
        return {"stretch": True}
    raise ValueError(f"no network of text says {', '.join(after)} of itself")
