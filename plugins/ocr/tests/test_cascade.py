"""Requests to the models and the use of their answers, the decoding of characters, and the three tasks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from anychip_ocr.cascade import Ppocr
from anychip_ocr.detection import TextDetection
from anychip_ocr.direction import TextDirection
from anychip_ocr.paddlex import PaddleX
from anychip_ocr.recognition import TextRecognition

from app.errors import ServiceError
from models import parse_spec
from models.contract.errors import ModelError
from models.contract.model import Options, Placement
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile


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


# --- The three tasks

STATED = json.dumps({"character": "a\nb\nc"})


def reader(steps=6):
    return TextRecognition(AdaptedFile(Whole((48, 320)), (), ((1, steps, 5),), stated=STATED))


@pytest.mark.parametrize(
    ("path", "text"),
    [((0, 1, 1, 0, 1, 2), "aab"), ((1, 1, 2, 2, 3, 3), "abc"), ((3, 4, 1, 0, 0, 0), "c a"), ((0,) * 6, "")],
)
def test_repeated_characters_are_one_unless_a_blank_is_between(path, text):
    probabilities = np.full(6, 0.5, np.float32)
    assert reader().read(probabilities, np.array(path, np.int32)) == (text, 0.5 if text else 0.0)


def test_the_device_chooses_and_the_server_reads():
    scores = torch.full((2, 6, 5), 0.1)
    scores[0, 0, 1], scores[0, 2, 2] = 0.9, 0.7
    scores[0, [1, 3, 4, 5], 0] = scores[1, :, 0] = 0.8
    best, characters = (each.numpy() for each in reader().compute([scores]))
    assert best.dtype == np.float32
    assert characters.shape == (2, 6)
    said = [reader().postprocess((best[row], characters[row]), Placement(9, 9), Options()) for row in (0, 1)]
    assert said == [{"text": "ab", "score": 0.8}, {"text": "", "score": 0.0}]


def test_text_is_found_at_its_place_in_the_image():
    task = TextDetection(AdaptedFile(Whole((736, 736)), (), ((1, 1, 736, 736),)))
    out = np.empty((736, 736, 3), np.uint8)
    placement = task.place(np.full((368, 300, 3), 9, np.uint8), out, 300, 368)
    assert (out[:, 608:] == 127).all()
    assert (out[:, :608] == 9).all()
    found = np.zeros((1, 736, 736), np.float32)
    found[0, 100:121, 200:401] = 1
    [line] = task.postprocess(task.reduce([found], Options()), placement, Options())["lines"]
    assert line["score"] == pytest.approx(1, abs=0.1)
    left, top = line["corners"][0]
    assert (left, top) == pytest.approx((200 * 300 / 608 - 7.5, 50 - 7.5), abs=2)


def test_a_line_on_its_head_is_said_so_where_that_is_sure():
    task = TextDirection(AdaptedFile(Whole((48, 192)), (), ((1, 2),)))
    turned = [task.postprocess([np.array(each)], Placement(9, 9), Options()) for each in ((0.05, 0.95), (0.2, 0.8))]
    assert turned == [{"turned": True, "score": 0.95}, {"turned": False, "score": 0.8}]
