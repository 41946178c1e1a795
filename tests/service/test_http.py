"""The service over HTTP: every body form, every failure we can think of, with the promised status, code and body; and
TorchServe's and KServe v1's clients: their paths, their body forms, answers in their shape.
"""

from __future__ import annotations

import base64
import json
import re

import pytest
from PIL import Image

from app.access.rules import LIVE, READY
from app.http.api_description import PredictAnswer
from tests.support.answers import assert_error
from tests.support.images import JPEG, encoded
from tests.support.photographs import FILES

PHOTO = FILES[0].read_bytes()
PREDICT = "/v1/models/resnet18:predict"
DETECT = "/v1/models/yolov8n:predict"

pytestmark = pytest.mark.xdist_group("shared service")


def test_a_raw_image_is_classified(either):
    answer = either.post(PREDICT, content=PHOTO, headers=JPEG)
    assert answer.status_code == 200
    PredictAnswer.model_validate_json(answer.content, strict=True)
    body = answer.json()
    [prediction] = body.pop("predictions")
    assert body == {
        "model": "resnet18",
        "weights": "random",
        "device": "cpu:0",
        "engine": "eager",
        "precision": "fp32",
    }
    with Image.open(FILES[0]) as image:
        assert (prediction["width"], prediction["height"]) == image.size
    scores = [found["score"] for found in prediction["classes"]]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)
    assert set(prediction["classes"][0]) == {"label", "class_id", "score"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", PREDICT, PHOTO),
        ("POST", PREDICT, b"no image"),
        ("GET", "/nothing", b""),
        ("DELETE", "/metrics", b""),
        ("GET", "/v2/health/live", b""),
    ],
)
def test_every_answer_carries_its_request_id_its_timing_and_its_trace(either, method, path, body):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {**JPEG, "X-Request-Id": "mine-1", "traceparent": trace}
    answer = either.request(method, path, content=body, headers=headers)
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("mine-1", trace)
    durations = {stage: float(ms) for stage, ms in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}
    assert set(durations) == {"decode", "queue", "infer", "post"}
    assert (durations["decode"] > 0 and durations["infer"] > 0) == (answer.status_code == 200 and method == "POST")


@pytest.mark.parametrize("given", ["", "two words", "x" * 200, "umlaut-ä".encode()])
def test_a_request_id_that_cannot_be_trusted_is_replaced(either, given):
    answer = either.get("/v2/health/live", headers={"X-Request-Id": given})
    assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])


def test_the_three_body_forms_give_one_answer(either):
    raw = either.post(PREDICT, content=PHOTO, headers=JPEG).json()["predictions"]
    form = either.post(PREDICT, files={"file": ("cat.jpg", PHOTO, "image/jpeg")}).json()["predictions"]
    instances = {"instances": [{"b64": base64.b64encode(PHOTO).decode()}]}
    json = either.post(PREDICT, json=instances).json()["predictions"]
    assert raw == form == json


def test_several_images_are_answered_in_their_order(either):
    images = [encoded(Image.new("RGB", (10 + 10 * number, 20))) for number in range(8)]
    files = [("file", (f"{number}.png", image, "image/png")) for number, image in enumerate(images)]
    widths = [each["width"] for each in either.post(PREDICT, files=files).json()["predictions"]]
    assert widths == [10, 20, 30, 40, 50, 60, 70, 80]
    instances = [{"b64": base64.b64encode(image).decode()} for image in reversed(images)]
    widths = [each["width"] for each in either.post(PREDICT, json={"instances": instances}).json()["predictions"]]
    assert widths == [80, 70, 60, 50, 40, 30, 20, 10]


def test_options_are_obeyed(either):
    classes = either.post(f"{PREDICT}?top_k=3", content=PHOTO, headers=JPEG).json()["predictions"][0]["classes"]
    assert len(classes) == 3
    boxes = either.post(f"{DETECT}?score_threshold=0&max_detections=2", content=PHOTO, headers=JPEG)
    assert len(boxes.json()["predictions"][0]["detections"]) == 2
    many = either.post(f"{PREDICT}?top_k=5000", content=PHOTO, headers=JPEG).json()["predictions"][0]["classes"]
    assert len(many) == 1000


def test_who_does_not_ask_for_html_is_told_that_the_server_lives(either):
    for accept in ("*/*", "application/json"):
        answer = either.get("/", headers={"Accept": accept})
        assert (answer.status_code, answer.json()) == (200, {"status": "alive"})
    browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    assert either.get("/", headers={"Accept": browser}).headers["content-type"].startswith("text/html")


def test_a_model_says_its_task_and_its_labels(either):
    said = either.get("/v1/models/yolov8n/labels").json()
    assert (said["task"], said["finds"], said["labels"][:2]) == ("detect", "objects", ["person", "bicycle"])
    assert either.get("/v2/models/yolov8n").json()["parameters"]["labels"] == said["labels"]
    assert_error(either.get("/v1/models/none/labels"), 404, "MODEL_NOT_FOUND")


MULTIPART = "multipart/form-data; boundary=b"
HALF = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n' + PHOTO[:1000]
NO_FILE = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n--b--\r\n'
BODIES = {
    "an empty body": ("image/jpeg", b"", 400, "INVALID_REQUEST"),
    "HTML named .jpg": ("image/jpeg", b"<!DOCTYPE html><html></html>", 422, "INVALID_IMAGE"),
    "a truncated JPEG": ("image/jpeg", PHOTO[: len(PHOTO) // 2], 422, "INVALID_IMAGE"),
    "zeros": ("image/jpeg", b"\0" * 1000, 422, "INVALID_IMAGE"),
    "an image without pixels": ("image/jpeg", b"BM" + bytes(12) + b"\x28" + bytes(60), 422, "INVALID_IMAGE"),
    "a 60-megapixel PNG": ("image/jpeg", encoded(Image.new("1", (10_000, 6_000))), 413, "IMAGE_TOO_LARGE"),
    "half a multipart": (MULTIPART, HALF, 400, "INVALID_REQUEST"),
    "a multipart that names no boundary": ("multipart/form-data", HALF + b"\r\n--b--\r\n", 400, "INVALID_REQUEST"),
    "no file": (MULTIPART, NO_FILE, 400, "INVALID_REQUEST"),
}
"""Of each its content type, and the status and code of its answer."""


@pytest.mark.parametrize("what", BODIES)
def test_a_body_that_is_no_good_image(either, what):
    content_type, body, status, code = BODIES[what]
    assert_error(either.post(PREDICT, content=body, headers={"Content-Type": content_type}), status, code)


def test_one_bad_image_of_several_fails_the_request_and_nothing_else(either):
    files = [("file", ("a.jpg", PHOTO)), ("file", ("b.jpg", b"<html>")), ("file", ("c.jpg", PHOTO))]
    for path in (PREDICT, f"{DETECT}?tile=320"):
        assert assert_error(either.post(path, files=files), 422, "INVALID_IMAGE").startswith("image 1: ")
    assert either.post(PREDICT, content=PHOTO, headers=JPEG).status_code == 200


def test_too_many_images(either):
    files = [("file", (f"{number}.jpg", PHOTO)) for number in range(9)]
    assert "8" in assert_error(either.post(PREDICT, files=files), 400, "INVALID_REQUEST")


def test_a_body_that_is_too_large_whether_or_not_it_says_so(either):
    for content in (bytes(21 * 2**20), iter([bytes(2**20)] * 21)):
        assert_error(either.post(PREDICT, content=content, headers=JPEG), 413, "BODY_TOO_LARGE")


@pytest.mark.parametrize("content_type", ["text/plain", "video/mp4", "nonsense"])
def test_a_content_type_that_is_not_read(either, content_type):
    answer = either.post(PREDICT, content=PHOTO, headers={"Content-Type": content_type})
    assert "image/jpeg" in assert_error(answer, 415, "UNSUPPORTED_MEDIA_TYPE")


@pytest.mark.parametrize("said", [{}, {"Content-Type": "application/octet-stream"}])
def test_the_first_bytes_decide_where_the_content_type_says_nothing(either, said):
    expected = either.post(PREDICT, content=PHOTO, headers=JPEG).json()
    assert either.post(PREDICT, content=PHOTO, headers=said).json() == expected
    instances = json.dumps({"instances": [{"b64": base64.b64encode(PHOTO).decode()}]})
    assert either.post(PREDICT, content=instances, headers=said).status_code == 200
    other = either.post(PREDICT, content=b"\0\0\0\x1cftypavif" + bytes(64), headers=said)
    assert "AVIF" in assert_error(other, 422, "INVALID_IMAGE")


@pytest.mark.parametrize("path", [*LIVE, *READY, "/metrics", "/", "/docs", "/v1/stats/stream"])
def test_head_is_get_without_its_body(either, path):
    with either.stream("GET", path) as answer:
        expected = answer.status_code, answer.headers["content-type"]
    answer = either.head(path)
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (*expected, b"")
    assert either.get("/v2/health/live").status_code == 200  # On the same connection.


def test_trace_is_never_allowed(either):
    for path in ("/v2/health/live", PREDICT, "/v2/repository/index"):
        assert_error(either.request("TRACE", path), 405, "METHOD_NOT_ALLOWED")


def test_an_unknown_model_is_refused_and_makes_no_metric(either):
    answer = either.post("/v1/models/resnet19:predict", content=PHOTO, headers=JPEG)
    assert "resnet18, yolov8n" in assert_error(answer, 404, "MODEL_NOT_FOUND")
    assert "/docs" in assert_error(either.get("/resnet19"), 404, "NOT_FOUND")
    assert "resnet19" not in either.get("/metrics").text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", PREDICT),
        ("POST", "/v2/health/ready"),
        ("DELETE", "/metrics"),
    ],
)
def test_a_wrong_method(either, method, path):
    answer = either.request(method, path)
    assert_error(answer, 405, "METHOD_NOT_ALLOWED")
    assert answer.headers["allow"]


def test_what_is_served(either):
    models = {model["name"]: model for model in either.get("/v1/models").json()["models"]}
    assert set(models) == {"resnet18", "yolov8n"}
    assert models["resnet18"]["task"] == "classify"
    assert models["resnet18"]["classes"] == 1000
    assert models["yolov8n"]["input_shape"] == [640, 640, 3]
    [served_on] = models["yolov8n"]["served_on"]
    assert (served_on["device"], served_on["engine"], served_on["precision"]) == ("cpu:0", "eager", "fp32")
    assert served_on["batch_sizes"] == [1, 2, 4]
    assert served_on["operators"] == {}
    [device] = either.get("/v1/devices").json()["devices"]
    assert (device["device"], device["vendor"], device["ready"]) == ("cpu:0", "cpu", True)


OTHER = FILES[2].read_bytes()


def expected(either, model, photo=PHOTO):
    return either.post(f"/v1/models/{model}:predict", content=photo, headers=JPEG).json()["predictions"][0]


def test_ping_and_the_list_of_models(either):
    assert either.get("/ping").json() == {"status": "Healthy"}
    assert either.get("/models").json() == {
        "models": [{"modelName": name, "modelUrl": "random"} for name in ("resnet18", "yolov8n")]
    }


@pytest.mark.parametrize("path", ["/predictions/resnet18", "/predictions/resnet18/1"])
def test_a_classifier_answers_as_image_classifier_does(either, path):
    classes = {each["label"]: each["score"] for each in expected(either, "resnet18")["classes"]}
    assert len(classes) == 5
    assert either.put(path, content=PHOTO).json() == classes  # curl -T: no content type at all
    assert either.post(path, files={"data": ("cat.jpg", PHOTO)}).json() == classes  # -F data=@cat.jpg
    unsaid = {"Content-Type": "application/x-www-form-urlencoded"}  # --data-binary
    assert either.post(path, content=PHOTO, headers=unsaid).json() == classes


def test_a_detector_answers_as_object_detector_does(either):
    detections = expected(either, "yolov8n", OTHER)["detections"]
    assert detections
    answer = either.post("/predictions/yolov8n", content=OTHER, headers=JPEG).json()
    assert answer == [
        {each["label"]: [each["box"][side] for side in ("x1", "y1", "x2", "y2")], "score": each["score"]}
        for each in detections
    ]


def test_errors_of_torchserves_paths(either):
    assert_error(either.post("/predictions/nobody", content=PHOTO), 404, "MODEL_NOT_FOUND")
    assert_error(either.post("/predictions/resnet18/2.0", content=PHOTO), 404, "MODEL_NOT_FOUND")
    assert_error(either.post("/predictions/resnet18", content=b"<html>"), 422, "INVALID_IMAGE")


def test_kserve_v1(either):
    assert either.get("/v1/models/resnet18").json() == {"name": "resnet18", "ready": True}
    assert_error(either.get("/v1/models/nobody"), 404, "MODEL_NOT_FOUND")
