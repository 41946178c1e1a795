"""One image at a time without a server: `anychip predict`.

Owns: the way from encoded bytes to a prediction in this process, and drawing it. It has no queue and no worker.
"""

from __future__ import annotations

import colorsys
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps

from app.config import Settings, split
from app.images.header import check_pixels, read_header
from app.precision.gate import compile_options
from app.precision.probes import Calibration, probes
from app.serving.service import decode_into
from backends import Unbuilt, choose, register_operator_libraries, simulated
from models import Options, PixelModel

Prediction = Mapping[str, Any]
"""One entry of "predictions" (docs/api.md), as postprocessing returns it or as JSON brought it."""

_GOLDEN_RATIO = 0.618034  # Steps of it around the colour circle keep neighbouring classes apart.


class Predictor:
    """A model on the first device that fits the settings, for batches of one."""

    def __init__(self, model: PixelModel, settings: Settings) -> None:
        """Raises ModelError, BackendError, CalibrationError."""
        if settings.simulate:
            simulated.configure(settings.simulate, settings.cache_dir.expanduser())
        register_operator_libraries(split(settings.operator_libraries))
        choice = choose(settings.device)
        self._model = model
        self._settings = settings
        self._pixels = torch.zeros((1, *model.input_shape), dtype=torch.uint8)
        options = compile_options(
            model,
            probes(model) if choice.backend.facts.computes else None,
            Calibration(model, settings.calibrate) if settings.precision == "int8" else None,
            settings.cache_dir.expanduser(),
        )
        self._executable, _ = choice.backend.load(
            Unbuilt(model.input_shape, model.network),
            choice.devices[0],
            settings.engine,
            settings.precision,
            (1,),
            options=options,
        )

    def predict(self, encoded: bytes, options: Options) -> Prediction:
        """Predict for one encoded image. Raises ImageError."""
        header = read_header(encoded)
        check_pixels(header, self._settings.max_image_pixels)
        placement = decode_into(self._model, encoded, header, self._pixels[0])
        outputs = self._executable.run(self._pixels.numpy())
        return self._model.postprocess(self._model.reduce(outputs, 0, options), placement, options)


def draw(encoded: bytes, prediction: Prediction, target: Path) -> Path:
    """Write the image as PNG with its boxes, or its best class, drawn in; returns the file's path."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    canvas = ImageDraw.Draw(image)
    line = max(2, round(max(image.size) / 300))
    font = ImageFont.load_default(size=max(12, 5 * line))
    for found in prediction.get("detections") or prediction.get("classes", [])[:1]:
        colour = _colour(found["class_id"])
        text = f"{found['label']} {found['score']:.2f}"
        corner = (0.0, 0.0)
        if "box" in found:
            box = found["box"]
            corner = (box["x1"], box["y1"])
            canvas.rectangle((*corner, box["x2"], box["y2"]), outline=colour, width=line)
        canvas.rectangle(canvas.textbbox(corner, text, font=font), fill=colour)
        canvas.text(corner, text, fill="black", font=font)
    target.parent.mkdir(parents=True, exist_ok=True)
    image.save(target)
    return target


def _colour(class_id: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(class_id * _GOLDEN_RATIO % 1, 0.55, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)
