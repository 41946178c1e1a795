"""Handler that most people write: FastAPI, Pillow, torchvision's transforms, eager float32, one image at a time.

python -m benchmarks.naive_server MODEL WEIGHTS PORT
"""

from __future__ import annotations

import io
import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, UploadFile
from PIL import Image
from torchvision.transforms import v2

from app.config import Settings
from models import open_model, parse_spec


def create_app(name: str, weights: str) -> FastAPI:
    """Make a classifier behind one route, as in many tutorials; FastAPI runs a plain `def` in its thread pool."""
    model = open_model(parse_spec(name, weights), Settings().weights_dir)
    network = model.network().core
    height, width, _ = model.input_shape
    transform = v2.Compose(
        [
            v2.Resize(round(height * 232 / 224)),
            v2.CenterCrop((height, width)),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    app = FastAPI()

    @app.post("/predict")
    def predict(file: UploadFile) -> dict[str, Any]:
        image = Image.open(io.BytesIO(file.file.read())).convert("RGB")
        with torch.no_grad():
            scores = network(transform(image)[None]).softmax(1)[0]
        best = scores.topk(5)
        return {
            "classes": [
                {"label": model.labels[index], "score": score}
                for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        }

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(sys.argv[1], sys.argv[2]), port=int(sys.argv[3]), log_level="warning")
