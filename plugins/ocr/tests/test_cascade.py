"""Requests to the models, and the use of their answers."""

from __future__ import annotations

import pytest
from anychip_ocr.cascade import Ppocr
from anychip_ocr.paddlex import PaddleX

from app.errors import ServiceError
from models import parse_spec
from models.contract.errors import ModelError
from models.contract.model import Options


@pytest.fixture
def folder(tmp_path):
    for name in ("PP-OCRv6_det_small", "PP-OCRv6_rec_small", "ch_ppocr_mobile_v2.0_cls_mobile"):
        (tmp_path / f"{name}.onnx").touch()
    return tmp_path


class Request:
    """Two images: the first has two lines, of which one is long and on its head."""

    def __init__(self):
        self.asked = []

    def sizes(self):
        return [(1280, 960), (700, 1200)]

    def detected(self, images):
        long = {"score": 0.9, "corners": [[0, 0], [600, 0], [600, 20], [0, 20]]}
        short = {"score": 0.9, "corners": [[0, 50], [20, 50], [20, 150], [0, 150]]}
        return [
            {"lines": [dict(long), dict(short)] if number == 0 else [], "width": 1, "height": 1} for number in images
        ]

    async def parts(self, model, parts):
        if "detect" in model:
            self.asked.append((model, [image for image, _ in parts]))
            return self.detected([image for image, _ in parts])
        self.asked.append((model, [(image, region.quarters) for image, region in parts]))
        if "direction" in model:
            return [{"turned": region.width == 600, "score": 1.0} for _, region in parts]
        return [{"text": model, "score": 0.8 if region.width == 600 else 0.4} for _, region in parts]


async def test_lines_go_to_the_recogniser_of_their_width(folder):
    cascade, request = Ppocr("ocr", str(folder)), Request()
    first, second = await cascade.predict(request, Options())
    assert request.asked == [
        ("ocr.detect-960x1280", [0]),
        ("ocr.detect-1280x960", [1]),
        ("ocr.direction", [(0, 0), (0, 1)]),
        ("ocr.read-2560", [(0, 2)]),
        ("ocr.read-320", [(0, 1)]),
    ]
    assert [line["text"] for line in first["lines"]] == ["ocr.read-2560"], "what is read badly is left out"
    assert second["lines"] == []
    assert (
        await cascade.predict(Request(), Options(score_threshold=0.9)) == [{"lines": [], "width": 1, "height": 1}] * 2
    )


def test_its_models_are_files_with_their_sidecars(folder):
    cascade = Ppocr("ocr", f"{folder}?sizes=736x1280|736&widths=640|320")
    assert cascade.models == (
        "ocr.detect-736x736",
        "ocr.detect-736x1280",
        "ocr.direction",
        "ocr.read-320",
        "ocr.read-640",
    )
    specs = [parse_spec(each) for each in cascade.written]
    assert [spec.name for spec in specs] == list(cascade.models)
    assert {spec.architecture for spec in specs} == {"onnx"}
    assert "text-direction" in specs[2].sidecar


def test_folders_of_paddleocr_and_without_a_direction(tmp_path):
    for name in ("PP-OCRv5_mobile_det", "PP-OCRv5_mobile_rec"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inference.onnx").touch()
    cascade = Ppocr("ocr", str(tmp_path))
    assert cascade.director is None
    assert all("inference.onnx" in each for each in cascade.written)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?sizes=100x100", "multiples of 32"),
        ("?widths=many", "not understood"),
        ("?colour=red", "has an option 'colour'"),
        ("/nowhere", "wants one network of detection"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(folder, query, words):
    with pytest.raises(ModelError, match=words):
        Ppocr("ocr", f"{folder}{query}")


def test_paddlex_is_answered_in_its_words(folder):
    client = PaddleX()
    cascades = {"other": object(), "ocr": Ppocr("ocr", str(folder))}
    name, options = client.choose({"textRecScoreThresh": 0.7}, cascades)
    assert (name, options.score_threshold) == ("ocr", 0.7)
    line = {"text": "读", "score": 0.9, "corners": [[1.2, 2], [9, 3], [9, 7], [0, 6]]}
    answer = client.answer({}, {"lines": [line], "width": 10, "height": 8}, "one")
    assert (answer["logId"], answer["errorCode"], answer["errorMsg"]) == ("one", 0, "Success")
    assert answer["result"]["dataInfo"] == {"width": 10, "height": 8, "type": "image"}
    [page] = answer["result"]["ocrResults"]
    assert page["prunedResult"]["rec_texts"] == ["读"]
    assert page["prunedResult"]["rec_boxes"] == [[0, 2, 9, 7]]
    for document in ({"fileType": 0}, {"textRecScoreThresh": 2}):
        with pytest.raises(ServiceError) as refused:
            client.choose(document, cascades)
        assert client.refuse(refused.value, "two")["errorCode"] == 400
    with pytest.raises(ServiceError, match="no model here reads text"):
        client.choose({}, {})
