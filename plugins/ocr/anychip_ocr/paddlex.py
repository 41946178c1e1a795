"""`POST /ocr` in the form of PaddleX's basic serving: `--compat paddlex`.

PaddleX's drawings (`visualize`) are not answered, and PDF files are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anychip_ocr.cascade import Ppocr
from app.compat.client import JsonClient
from app.errors import ServiceError, invalid_request
from models.contract.cascade import Cascade
from models.contract.model import Options

_PDF = 0


class PaddleX(JsonClient):
    """PaddleX's requests of one image in base64, answered by the first cascade of this package."""

    path = "/ocr"

    def choose(self, document: Mapping[str, Any], cascades: Mapping[str, Cascade]) -> tuple[str, Options]:
        """Choose the first cascade that reads text. Raises MODEL_NOT_FOUND, INVALID_REQUEST."""
        name = next((name for name, cascade in cascades.items() if isinstance(cascade, Ppocr)), None)
        if name is None:
            raise ServiceError("MODEL_NOT_FOUND", "no model here reads text: serve one with ocr=ppocr:FOLDER")
        if document.get("fileType") == _PDF:
            raise invalid_request("PDF files are not read here: send each page as an image")
        threshold = document.get("textRecScoreThresh") or 0.0
        if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            raise invalid_request("textRecScoreThresh must be a number from 0 to 1")
        return name, Options(score_threshold=float(threshold))

    def answer(self, document: Mapping[str, Any], found: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """Return `result` with one page."""
        lines = found["lines"]
        corners = [[[round(x), round(y)] for x, y in line["corners"]] for line in lines]
        upright = [[*map(min, zip(*each, strict=True)), *map(max, zip(*each, strict=True))] for each in corners]
        pruned = {
            "model_settings": {"use_doc_preprocessor": False, "use_textline_orientation": True},
            "dt_polys": corners,
            "text_type": "general",
            "text_rec_score_thresh": document.get("textRecScoreThresh") or 0.0,
            "rec_texts": [line["text"] for line in lines],
            "rec_scores": [line["score"] for line in lines],
            "rec_polys": corners,
            "rec_boxes": upright,
        }
        page = {"width": found["width"], "height": found["height"], "type": "image"}
        result = {"ocrResults": [{"prunedResult": pruned}], "dataInfo": page}
        return {"logId": request_id, "errorCode": 0, "errorMsg": "Success", "result": result}

    def refuse(self, error: ServiceError, request_id: str) -> dict[str, Any]:
        """Return the status, and a sentence."""
        return {"logId": request_id, "errorCode": error.status, "errorMsg": error.message}
