"""Large images in tiles: small objects are found, each once, and a request's images stay bounded."""

from __future__ import annotations

import pytest
from PIL import Image

from app.http.schemas import PredictAnswer
from models.sample import IMAGES
from tests.support.images import JPEG, encoded, png
from tests.support.service_process import running

PREDICT = "/v1/models/yolov8n:predict"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    options = ("--models", "yolov8n,resnet50", "--weights", "sample", "--engine", "eager", "--batch-sizes", "4")
    options += ("--precision", "fp32", "--max-images", "16", "--tiles", "yolov8n=500:0.3")
    with running(tmp_path_factory.mktemp("tiles"), *options) as service:
        yield service


def mosaic():
    """Paste the sample image twice across and twice down, 1280 x 960."""
    with Image.open(IMAGES / "detect_1.jpg") as image:
        whole = Image.new("RGB", (1280, 960))
        for x in (0, 640):
            for y in (0, 480):
                whole.paste(image, (x, y))
    return whole


def overlap(one, other):
    width = min(one["x2"], other["x2"]) - max(one["x1"], other["x1"])
    height = min(one["y2"], other["y2"]) - max(one["y1"], other["y1"])
    areas = ((box["x2"] - box["x1"]) * (box["y2"] - box["y1"]) for box in (one, other))
    common = max(0, width) * max(0, height)
    return common / (sum(areas) - common)


def test_objects_on_and_off_the_seams_are_found_once(service):
    single, large = (IMAGES / "detect_1.jpg").read_bytes(), encoded(mosaic(), "JPEG", quality=95)
    with service.client() as client:
        [alone] = client.post(f"{PREDICT}?tile=0", content=single, headers=JPEG).json()["predictions"]
        answer = client.post(f"{PREDICT}?tile=500&overlap=0.3", content=large, headers=JPEG)
        by_setting = client.post(PREDICT, content=large, headers=JPEG).json()
        [tiled] = PredictAnswer.model_validate_json(answer.content, strict=True).model_dump()["predictions"]
    assert (tiled["width"], tiled["height"]) == (1280, 960)
    assert by_setting["predictions"] == answer.json()["predictions"]
    expected = [
        {**found, "box": {name: value + move[name[0]] for name, value in found["box"].items()}}
        for found in alone["detections"]
        if found["score"] > 0.6
        for move in ({"x": x, "y": y} for x in (0, 640) for y in (0, 480))
    ]
    assert len(expected) >= 12
    for wanted in expected:
        same = [
            found
            for found in tiled["detections"]
            if found["class_id"] == wanted["class_id"] and overlap(found["box"], wanted["box"]) > 0.6
        ]
        assert len(same) == 1, wanted
    assert len(tiled["detections"]) <= 4 * len(alone["detections"]) + 4


def test_turned_images_are_cut_as_they_are_displayed(service):
    exif = Image.Exif()
    exif[0x112] = 6
    upright = mosaic()
    stored = upright.transpose(Image.Transpose.ROTATE_90)
    with service.client() as client:
        first, second = (
            client.post(f"{PREDICT}?tile=500", content=content, headers=JPEG).json()["predictions"][0]
            for content in (encoded(upright, "JPEG"), encoded(stored, "JPEG", exif=exif))
        )
    assert (second["width"], second["height"]) == (1280, 960)
    assert abs(len(first["detections"]) - len(second["detections"])) <= 2


def test_what_cannot_be_cut_is_refused_in_a_sentence(service):
    large = png(size=(2000, 2000))
    small = (IMAGES / "detect_1.jpg").read_bytes()
    with service.client() as client:
        refused = client.post(f"{PREDICT}?tile=320", content=large, headers=JPEG)
        assert (refused.status_code, refused.json()["code"]) == (400, "INVALID_REQUEST")
        assert "65 images of this request, and it may hold 16" in refused.json()["error"]
        broken = client.post(f"{PREDICT}?tile=320", content=small[:3000], headers=JPEG)
        assert broken.json()["code"] == "INVALID_IMAGE"
        asked = client.post("/v1/models/resnet50:predict?tile=320", content=small, headers=JPEG)
        assert "finds no objects" in asked.json()["error"]
        # Every slot is free again: as many images as there are slots are answered.
        for _ in range(4):
            assert client.post(f"{PREDICT}?tile=400", content=small, headers=JPEG).status_code == 200
