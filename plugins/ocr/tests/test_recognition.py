"""Decoding of characters, and the three tasks of their own."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from anychip_ocr.detection import TextDetection
from anychip_ocr.direction import TextDirection
from anychip_ocr.recognition import TextRecognition, edit_distance

from models.contract.model import Options, Placement
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile

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


@pytest.mark.parametrize(
    ("one", "other", "distance"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("中文字", "中字", 1)]
)
def test_edit_distance(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


def test_files_of_another_kind_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="reads 3 characters has one output"):
        TextRecognition(AdaptedFile(Whole((48, 320)), (), ((1, 40, 9),), stated=STATED))
    with pytest.raises(ValueError, match="finds text has one output"):
        TextDetection(AdaptedFile(Whole((64, 64)), (), ((1, 2, 64, 64),)))
    with pytest.raises(ValueError, match="directions has one output"):
        TextDirection(AdaptedFile(Whole((48, 192)), (), ((1, 4),)))


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
