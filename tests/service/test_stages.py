"""Two stages under one name: a detector, and a classifier of what it finds."""

from __future__ import annotations

import asyncio
import base64
import json

import httpx
import numpy as np
import pytest
from PIL import Image

from app.http.schemas import InferAnswer, PredictAnswer
from models.sample import IMAGES
from tests.support.images import JPEG, encoded, png
from tests.support.liveness import answering
from tests.support.service_process import running

IMAGE = IMAGES / "detect_1.jpg"
MODELS = "shapes=yolov8n?margin=0.1&most=3 > resnet50,some=yolov8n?classes=star|cross&min_side=20 > resnet50"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    options = ("--weights", "sample", "--engine", "eager", "--precision", "fp32", "--batch-sizes", "4")
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


def test_what_is_found_is_classified_from_the_original_image(service):
    content = IMAGE.read_bytes()
    with service.client() as client:
        response = client.post("/v1/models/shapes:predict?top_k=2", content=content, headers=JPEG)
        answer = PredictAnswer.model_validate_json(response.content, strict=True).model_dump()
        [plain] = client.post("/v1/models/yolov8n:predict", content=content, headers=JPEG).json()["predictions"]
        detections = answer["predictions"][0]["detections"]
        assert answer["model"] == "shapes"
        assert [found["box"] for found in detections] == [found["box"] for found in plain["detections"]]
        assert sum(found["classes"] is not None for found in detections) == 3
        for found in detections[:3]:
            part = cropped(found["box"], 0.1)
            alone = client.post(
                "/v1/models/resnet50:predict?top_k=2", content=part, headers={"Content-Type": "image/png"}
            )
            wanted = alone.json()["predictions"][0]["classes"]
            assert [each["label"] for each in found["classes"]] == [each["label"] for each in wanted]
            assert found["classes"][0]["score"] == pytest.approx(wanted[0]["score"], abs=2e-3)


def test_classes_are_chosen_and_several_images_are_answered_in_order(service):
    files = [("file", ("a.jpg", IMAGE.read_bytes())), ("file", ("b.png", png(size=(300, 200)))),
             ("file", ("c.jpg", IMAGE.read_bytes()))]  # fmt: skip
    with service.client() as client:
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


def test_it_is_a_model_in_every_protocol(service):
    with service.client() as client:
        listed = {model["name"]: model for model in client.get("/v1/models").json()["models"]}
        assert listed["shapes"]["architecture"] == "yolov8n > resnet50"
        assert client.get("/v1/models/shapes").json() == {"name": "shapes", "ready": True}
        described = client.get("/v2/models/shapes").json()
        assert described["platform"] == "ensemble"
        assert [each["name"] for each in described["outputs"]] == ["predictions"]
        assert client.get("/v2/models/shapes/config").json()["name"] == "shapes"
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0"}
        raw = client.post("/v2/models/shapes/infer", content=IMAGE.read_bytes(), headers=headers)
        assert raw.status_code == 200
        boxes = {"inputs": [], "outputs": [{"name": "boxes"}]}
        assert "has no output 'boxes'" in client.post("/v2/models/shapes/infer", json=boxes).json()["error"]
        refused = client.post("/v1/models/shapes:predict", content=b"no image", headers=JPEG)
        assert refused.json()["code"] == "INVALID_IMAGE"
        assert (
            "two stages" in client.post("/v1/models/shapes:predict?tile=99", content=b"x", headers=JPEG).json()["error"]
        )
        unknown = client.post("/v1/models/none:predict", content=b"x", headers=JPEG)
        assert "shapes" in unknown.json()["error"]
        tensor = {"name": "image", "shape": [1], "datatype": "BYTES",
                  "data": [base64.b64encode(IMAGE.read_bytes()).decode()]}  # fmt: skip
        answer = client.post("/v2/models/shapes/infer", json={"inputs": [tensor]})
        [output] = InferAnswer.model_validate_json(answer.content, strict=True).outputs
        assert json.loads(output.data[0])["detections"][0]["classes"]


async def test_parts_of_different_requests_share_batches(service):
    def counted(stats):
        found = next(model for model in stats["models"] if model["model"] == "resnet50")
        return np.array([found["images_computed"], found["batches"]])

    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        before = counted((await client.get("/v1/stats")).json())
        asked = [client.post("/v1/models/shapes:predict", content=IMAGE.read_bytes(), headers=JPEG) for _ in range(8)]
        answers = await asyncio.gather(*asked)
        images, batches = counted((await client.get("/v1/stats")).json()) - before
    assert {answer.status_code for answer in answers} == {200}
    assert images == 8 * 3
    assert batches < images / 1.5


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


def test_it_is_ready_when_both_are(service):  # The last: the second stage stays unloaded.
    with service.client() as client, service.admin_client() as admin:
        assert client.get("/v2/models/shapes/ready").status_code == 200
        assert admin.post("/v2/repository/models/resnet50/unload").status_code == 200
        assert [client.get(path).status_code for path in ("/v2/models/shapes/ready", "/v1/models/shapes")] == [503] * 2
        assert client.get("/v2/models/yolov8n/ready").status_code == 200
