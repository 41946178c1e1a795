"""TorchServe's and KServe v1's clients: their paths, their body forms, answers in their shape."""

from __future__ import annotations

import pytest

from tests.support.answers import assert_error
from tests.support.images import JPEG
from tests.support.photographs import FILES

PHOTO, OTHER = FILES[0].read_bytes(), FILES[2].read_bytes()

pytestmark = pytest.mark.xdist_group("shared service")


@pytest.fixture
def client(either):
    """Every question goes both ways: to the hot routes' own protocol, and to FastAPI."""
    return either


def expected(client, model, photo=PHOTO):
    return client.post(f"/v1/models/{model}:predict", content=photo, headers=JPEG).json()["predictions"][0]


def test_ping_and_the_list_of_models(client):
    assert client.get("/ping").json() == {"status": "Healthy"}
    assert client.get("/models").json() == {
        "models": [{"modelName": name, "modelUrl": "random"} for name in ("resnet18", "yolov8n")]
    }


@pytest.mark.parametrize("path", ["/predictions/resnet18", "/predictions/resnet18/1"])
def test_a_classifier_answers_as_image_classifier_does(client, path):
    classes = {each["label"]: each["score"] for each in expected(client, "resnet18")["classes"]}
    assert len(classes) == 5
    answers = [
        client.put(path, content=PHOTO),  # curl -T: no content type at all
        client.post(
            path, content=PHOTO, headers={"Content-Type": "application/x-www-form-urlencoded"}
        ),  # --data-binary
        client.post(path, content=PHOTO, headers=JPEG),
        client.post(path, files={"data": ("cat.jpg", PHOTO)}),  # -F data=@cat.jpg
        client.post(path, files={"body": ("cat.jpg", PHOTO, "image/jpeg")}),
    ]
    assert [answer.json() for answer in answers] == [classes] * 5


def test_a_detector_answers_as_object_detector_does(client):
    detections = expected(client, "yolov8n", OTHER)["detections"]
    assert detections
    answer = client.post("/predictions/yolov8n", content=OTHER, headers=JPEG).json()
    assert answer == [
        {each["label"]: [each["box"][side] for side in ("x1", "y1", "x2", "y2")], "score": each["score"]}
        for each in detections
    ]


def test_several_images_are_a_list(client):
    files = [("data", ("a.jpg", PHOTO)), ("data", ("b.jpg", OTHER))]
    both = client.post("/predictions/resnet18", files=files).json()
    assert both == [client.post("/predictions/resnet18", content=photo).json() for photo in (PHOTO, OTHER)]


def test_errors(client):
    assert_error(client.post("/predictions/nobody", content=PHOTO), 404, "MODEL_NOT_FOUND")
    assert_error(client.post("/predictions/resnet18/2.0", content=PHOTO), 404, "MODEL_NOT_FOUND")
    assert_error(client.post("/predictions/resnet18", content=b"<html>"), 422, "INVALID_IMAGE")
    assert_error(client.post("/predictions/resnet18", content=b""), 400, "INVALID_REQUEST")
    assert_error(client.get("/predictions/resnet18"), 405, "METHOD_NOT_ALLOWED")


def test_kserve_v1(client):
    assert client.get("/v1/models/resnet18").json() == {"name": "resnet18", "ready": True}
    assert_error(client.get("/v1/models/nobody"), 404, "MODEL_NOT_FOUND")
