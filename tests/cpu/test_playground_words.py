"""The page's language, and the files that it saves, without a browser."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from anychip_tools.prediction.files import convert
from tests.support.node import evaluated

BOX = {"x1": 1.5, "y1": 2.0, "x2": 11.5, "y2": 22.0}
CAT = {"label": "cat", "class_id": 3, "score": 0.5, "box": BOX}
SEGMENTED = {**CAT, "class_id": 1, "label": 'a "dog", big', "segments": [[[1, 2], [3, 4], [5, 6]], [[1, 1], [2, 2]]]}
SIZE = {"width": 30, "height": 40}
LINES: list[dict[str, Any]] = [
    {
        "file": "a, b.jpg",
        **SIZE,
        "detections": [CAT, SEGMENTED, {**CAT, "keypoints": [{"x": 1.5, "y": 2}]}],
    },
    {"file": "none.jpg", **SIZE, "detections": []},
    {"file": "broken.jpg", "error": "this is no image"},
]


@pytest.mark.parametrize(
    ("address", "browser", "language"),
    [
        ("", "zh-CN", "zh-CN"),
        ("", "zh", "zh-CN"),
        ("", "en-GB", "en"),
        ("", "de", "en"),
        ("?lang=en", "zh-CN", "en"),
        ("?lang=zh-CN", "en", "zh-CN"),
    ],
)
def test_the_address_chooses_the_language_and_else_the_browser(
    tmp_path: Path, address: str, browser: str, language: str
) -> None:
    program = """
    globalThis.location = { search: given[0] };
    Object.defineProperty(globalThis, "navigator", { value: { language: given[1] }, configurable: true });
    const { say, kindOf } = await import("./words.js");
    console.log(JSON.stringify([say("lang"), say("retry", { seconds: 2 }), kindOf("INTERNAL"), kindOf("NEW")]));
    """
    found = evaluated(tmp_path, program, [address, browser])
    assert found == (
        ["en", "Try again in 2 s.", "", ""]
        if language == "en"
        else ["zh-CN", "请在 2 秒后重试。", "服务自身的故障。", ""]
    )


SAVED = """
import { coco, csv } from "./tables.js";
console.log(JSON.stringify({ csv: csv(given), coco: coco(given) }));
"""


def by_predict(folder: Path, lines: list[dict[str, Any]]) -> Path:
    journal = folder / "journal.jsonl"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return journal


def cells(text: str) -> list[list[object]]:
    """Read a table; numbers are numbers, however they are written."""
    return [
        [float(cell) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell) else cell for cell in row]
        for row in csv.reader(io.StringIO(text, newline=""))
    ]


@pytest.mark.parametrize(
    "lines",
    [
        LINES,
        [{"file": "a.jpg", **SIZE, "classes": [{"label": "cat", "class_id": 3, "score": 0.0000012}]}],
        [{"file": "a.jpg", **SIZE, "areas": [{"label": "road", "class_id": 0, "share": 0.25}]}],
        [{"file": "a.jpg", **SIZE, "values": {"age": 31.5, "weight": -2.0}}],
        [{"file": "a.jpg", **SIZE, "embedding": [0.5, 1.0]}],
    ],
    ids=["detections", "classes", "areas", "values", "embedding"],
)
def test_the_csv_of_the_page_is_that_of_anychip_predict(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    found = evaluated(tmp_path / "page", SAVED, lines)
    convert(by_predict(tmp_path, lines), tmp_path / "out.csv")
    assert cells(found["csv"]) == cells((tmp_path / "out.csv").read_text(encoding="utf-8"))


def test_the_coco_json_of_the_page_is_that_of_anychip_predict(tmp_path: Path) -> None:
    found = evaluated(tmp_path / "page", SAVED, LINES)
    convert(by_predict(tmp_path, LINES), tmp_path / "out.json")
    assert found["coco"] == json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["coco"]["annotations"][0]["bbox"] == [1.5, 2.0, 10.0, 20.0]
