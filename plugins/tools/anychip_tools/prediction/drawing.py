"""Drawing of what was found into an image, in the playground's colours: `anychip predict --save`."""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from anychip_tools.prediction.files import run_lengths

Prediction = Mapping[str, Any]
"""Entry of "predictions" (docs/api.md), from postprocessing or from JSON."""

_PLACES = {"box", "corners", "segments", "keypoints", "mask"}
_GOLDEN_RATIO = 0.618034  # Steps of it around the colour circle keep neighbouring classes apart.
_LEAST_KEYPOINT_SCORE = 0.3
_OPACITY = 0.6  # Opacity of a map over the image.


def draw(encoded: bytes, prediction: Prediction, target: Path) -> Path:
    """Write the image as PNG with what was found, or its best class, drawn in; return its path. Raises OSError."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    if (over := _map(prediction)) is not None:
        image = Image.blend(image, over.resize(image.size, Image.Resampling.NEAREST), _OPACITY)
    canvas = ImageDraw.Draw(image, "RGBA")
    line = max(2, round(max(image.size) / 300))
    font = ImageFont.load_default(size=max(12, 5 * line))
    for found in _placed(prediction) or prediction.get("classes", [])[:1]:
        colour = _colour(found.get("class_id", 0))
        for outline in filter(lambda each: len(each) > 1, found.get("segments") or ()):
            canvas.polygon([*map(tuple, outline)], fill=(*colour, 90), outline=colour, width=line)
        if found.get("mask"):
            mask = _mask(found["mask"]).resize(image.size, Image.Resampling.NEAREST)
            image.paste(colour, (0, 0), mask)
        turned = [*map(tuple, found.get("corners") or ())]
        if turned:
            canvas.polygon(turned, outline=colour, width=line)
        elif "box" in found:
            box = found["box"]
            canvas.rectangle((box["x1"], box["y1"], box["x2"], box["y2"]), outline=colour, width=line)
        seen = (each for each in found.get("keypoints") or () if each["score"] >= _LEAST_KEYPOINT_SCORE)
        for x, y in ((each["x"], each["y"]) for each in seen):
            canvas.ellipse((x - line, y - line, x + line, y + line), fill="white", outline=colour)
        corner = (found["box"]["x1"], found["box"]["y1"]) if "box" in found else (turned or [(0.0, 0.0)])[0]
        second = f": {found['classes'][0]['label']}" if found.get("classes") else ""
        label = next((each for each in found.values() if isinstance(each, str)), "")
        text = f"{label}{second} {found.get('score', found.get('share')):.2f}"
        canvas.rectangle(canvas.textbbox(corner, text, font=font), fill=colour)
        canvas.text(corner, text, fill="black", font=font)
    values = "\n".join(f"{name} {value:.4g}" for name, value in prediction.get("values", {}).items())
    if values:
        canvas.rectangle(canvas.textbbox((line, line), values, font=font), fill="white")
        canvas.text((line, line), values, fill="black", font=font)
    target.parent.mkdir(parents=True, exist_ok=True)
    image.save(target)
    return target


def _mask(mask: Mapping[str, Any]) -> Image.Image:
    """Return a mask in either form (docs/answers.md) as the opacity of its colour."""
    height, width = mask["size"]
    if "png" in mask:
        whole = Image.new("L", (width, height))
        whole.paste(Image.open(io.BytesIO(base64.b64decode(mask["png"]))), (mask["x"], mask["y"]))
    else:
        runs = run_lengths(mask["counts"])
        flags = np.repeat(np.arange(len(runs)) % 2, runs).reshape(width, height).T
        whole = Image.fromarray(flags.astype(np.uint8))
    return whole.point(lambda level: 90 if level else 0)


def _map(prediction: Prediction) -> Image.Image | None:
    found = prediction.get("class_map") or prediction.get("depth") or {}
    if "png" not in found:
        return None
    levels = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["png"]))))
    if "depth" in prediction:
        return Image.fromarray((levels >> 8).astype(np.uint8)).convert("RGB")
    return Image.fromarray(np.array([_colour(each) for each in range(int(levels.max()) + 1)], np.uint8)[levels])


def _placed(prediction: Prediction) -> Sequence[Prediction]:
    """Return the first list in an entry whose members all have a place, also of other packages' tasks."""
    lists = [each for each in prediction.values() if isinstance(each, list)]
    placed = [each for each in lists if all(isinstance(one, dict) and one.keys() & _PLACES for one in each)]
    return placed[0] if placed else ()


def _colour(class_id: int) -> tuple[int, int, int]:
    # The playground's hsl(… 85% 62%).
    red, green, blue = colorsys.hls_to_rgb(class_id * _GOLDEN_RATIO % 1, 0.62, 0.85)
    return round(red * 255), round(green * 255), round(blue * 255)
