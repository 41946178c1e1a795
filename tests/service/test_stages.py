"""What one request makes of parts of an image: two stages under one name, and large images in tiles."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from PIL import Image

from app.http.api_description import InferAnswer, PredictAnswer
from models.sample import IMAGES
from tests.support.images import JPEG, encoded, png
from tests.support.liveness import answering
from tests.support.service_process import running

IMAGE = IMAGES / "detect_1.jpg"
MODELS = "shapes=yolov8n?margin=0.1&most=3 > resnet50,some=yolov8n?classes=star|cross&min_side=20 > resnet50"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    options = ("--weights", "sample", "--engine", "eager", "--precision", "fp32", "--batch-sizes", "4")
    options += ("--max-images", "16")  # Of one that is looked at in tiles.
    with running(tmp_path_factory.mktemp("stages"), "--models", MODELS, *options) as service:
        yield service


def cropped(box, margin):
    """Cut the part of the image that the second stage is to see; return a PNG."""
    wide, high = margin * (box["x2"] - box["x1"]), margin * (box["y2"] - box["y1"])
    with Image.open(IMAGE) as image:
        left, top = max(0, int(np.floor(box["x1"] - wide))), max(0, int(np.floor(box["y1"] - high)))
        right, bottom = int(np.ceil(box["x2"] + wide)), int(np.ceil(box["y2"] + high))
        part = image.convert("RGB").crop((left, top, min(image.width, right), min(image.height, bottom)))
    return encoded(part)


def test_what_is_found_is_classified_from_the_original_image(client):
    content = IMAGE.read_bytes()
    response = client.post("/v1/models/shapes:predict?top_k=2", content=content, headers=JPEG)
    answer = PredictAnswer.model_validate_json(response.content, strict=True).model_dump()
    [plain] = client.post("/v1/models/yolov8n:predict", content=content, headers=JPEG).json()["predictions"]
    detections = answer["predictions"][0]["detections"]
    assert answer["model"] == "shapes"
    assert [found["box"] for found in detections] == [found["box"] for found in plain["detections"]]
    assert sum(found["classes"] is not None for found in detections) == 3
    for found in detections[:3]:
        part = cropped(found["box"], 0.1)
        alone = client.post("/v1/models/resnet50:predict?top_k=2", content=part, headers={"Content-Type": "image/png"})
        wanted = alone.json()["predictions"][0]["classes"]
        assert [each["label"] for each in found["classes"]] == [each["label"] for each in wanted]
        assert found["classes"][0]["score"] == pytest.approx(wanted[0]["score"], abs=2e-3)


def test_classes_are_chosen_and_several_images_are_answered_in_order(client):
    files = [("file", ("a.jpg", IMAGE.read_bytes())), ("file", ("b.png", png(size=(300, 200)))),
             ("file", ("c.jpg", IMAGE.read_bytes()))]  # fmt: skip
    before = client.get("/v1/stats").json()
    first, second, third = client.post("/v1/models/some:predict", files=files).json()["predictions"]
    after = client.get("/v1/stats").json()
    assert first == third
    assert (second["width"], second["height"]) == (300, 200)
    detections = [found for each in (first, second, third) for found in each["detections"]]
    for found in detections:
        assert ("classes" in found) == (found["label"] in ("star", "cross"))
    looked_at = sum("classes" in found for found in detections)
    assert looked_at

    def computed(stats):
        return next(model["images_computed"] for model in stats["models"] if model["model"] == "resnet50")

    assert computed(after) - computed(before) == looked_at


def test_it_is_a_model_in_every_protocol(client):
    assert client.get("/v1/models/shapes").json() == {"name": "shapes", "ready": True}
    described = client.get("/v2/models/shapes").json()
    assert described["platform"] == "ensemble"
    assert [each["name"] for each in described["outputs"]] == ["predictions"]
    refused = client.post("/v1/models/shapes:predict", content=b"no image", headers=JPEG)
    assert (refused.json()["code"], refused.json()["error"][:5]) == ("INVALID_IMAGE", "this ")
    files = [("file", ("a.jpg", IMAGE.read_bytes())), ("file", ("b.jpg", b"no image"))]
    assert client.post("/v1/models/shapes:predict", files=files).json()["error"].startswith("image 1: ")
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES",
              "data": [base64.b64encode(IMAGE.read_bytes()).decode()]}  # fmt: skip
    answer = client.post("/v2/models/shapes/infer", json={"inputs": [tensor]})
    [output] = InferAnswer.model_validate_json(answer.content, strict=True).outputs
    assert json.loads(output.data[0])["detections"][0]["classes"]


def test_however_much_is_found_is_classified_in_portions(tmp_path):
    options = ("--weights", "sample", "--engine", "eager", "--precision", "fp32", "--batch-sizes", "4",
               "--queue-size", "4", "--timeout-ms", "200000")  # fmt: skip
    models = "many=yolov8n?most=6&min_side=1 > resnet50"
    files = [("file", (f"{number}.jpg", IMAGE.read_bytes())) for number in range(2)]
    asked = "?score_threshold=0.001&iou_threshold=1&max_detections=6"
    started = running(tmp_path, "--models", models, *options, guarded=True)
    with started as service, answering(service), service.client() as client:
        answer = client.post(f"/v1/models/many:predict{asked}", files=files)
        assert answer.status_code == 200, answer.text
        [first, *others] = answer.json()["predictions"]
        looked_at = [found for found in first["detections"] if "classes" in found]
        assert len(looked_at) > 4, "fewer than may wait show nothing"
        assert others == [first]


PREDICT = "/v1/models/yolov8n:predict"


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


def test_objects_on_and_off_the_seams_are_found_once(client):
    single, large = (IMAGES / "detect_1.jpg").read_bytes(), encoded(mosaic(), "JPEG", quality=95)
    [alone] = client.post(f"{PREDICT}?tile=0", content=single, headers=JPEG).json()["predictions"]
    answer = client.post(f"{PREDICT}?tile=500&overlap=0.3", content=large, headers=JPEG)
    [tiled] = PredictAnswer.model_validate_json(answer.content, strict=True).model_dump()["predictions"]
    assert (tiled["width"], tiled["height"]) == (1280, 960)
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


def test_it_is_ready_when_both_are(service, client):  # The last: the second stage stays unloaded.
    with service.admin_client() as admin:
        assert client.get("/v2/models/shapes/ready").status_code == 200
        assert admin.post("/v2/repository/models/resnet50/unload").status_code == 200
        assert [client.get(path).status_code for path in ("/v2/models/shapes/ready", "/v1/models/shapes")] == [503] * 2
        assert client.get("/v2/models/yolov8n/ready").status_code == 200
