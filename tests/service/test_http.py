"""The service over HTTP: every body form, every failure we can think of, with the promised status, code and body."""

from __future__ import annotations

import base64
import json
import re
import socket
import zlib

import httpx
import pytest
from PIL import Image

from app.access.rules import LIVE, READY
from app.http.schemas import PredictAnswer
from tests.support.answers import assert_error
from tests.support.images import JPEG, encoded
from tests.support.photographs import FILES

PHOTO = FILES[0].read_bytes()
PREDICT = "/v1/models/resnet18:predict"
DETECT = "/v1/models/yolov8n:predict"

pytestmark = pytest.mark.xdist_group("shared service")


@pytest.fixture
def client(either):
    """Every question goes both ways: to the hot routes' own protocol, and to FastAPI."""
    return either


def test_a_raw_image_is_classified(client):
    answer = client.post(PREDICT, content=PHOTO, headers=JPEG)
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
        ("POST", "/v1/models/no:predict", PHOTO),
        ("GET", "/nothing", b""),
        ("DELETE", "/metrics", b""),
        ("GET", "/metrics", b""),
        ("GET", "/docs", b""),
        ("GET", "/v2/health/live", b""),
        ("GET", "/v1/stats", b""),
    ],
)
def test_every_answer_carries_its_request_id_its_timing_and_its_trace(client, method, path, body):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {**JPEG, "X-Request-Id": "mine-1", "traceparent": trace}
    answer = client.request(method, path, content=body, headers=headers)
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("mine-1", trace)
    durations = {stage: float(ms) for stage, ms in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}
    assert set(durations) == {"decode", "queue", "infer", "post"}
    assert (durations["decode"] > 0 and durations["infer"] > 0) == (answer.status_code == 200 and method == "POST")


@pytest.mark.parametrize("given", ["", "two words", "x" * 200, "umlaut-ä".encode()])
def test_a_request_id_that_cannot_be_trusted_is_replaced(client, given):
    answer = client.get("/v2/health/live", headers={"X-Request-Id": given})
    assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])


def test_boxes_lie_in_the_image(client):
    answer = client.post(f"{DETECT}?score_threshold=0", content=PHOTO, headers=JPEG)
    PredictAnswer.model_validate_json(answer.content, strict=True)
    [prediction] = answer.json()["predictions"]
    assert 0 < len(prediction["detections"]) <= 300
    for found in prediction["detections"]:
        box = found["box"]
        assert 0 <= box["x1"] <= box["x2"] <= prediction["width"]
        assert 0 <= box["y1"] <= box["y2"] <= prediction["height"]


def test_the_three_body_forms_give_one_answer(client):
    raw = client.post(PREDICT, content=PHOTO, headers=JPEG).json()["predictions"]
    form = client.post(PREDICT, files={"file": ("cat.jpg", PHOTO, "image/jpeg")}).json()["predictions"]
    instances = {"instances": [{"b64": base64.b64encode(PHOTO).decode()}]}
    json = client.post(PREDICT, json=instances).json()["predictions"]
    assert raw == form == json


def test_several_images_are_answered_in_their_order(client):
    images = [encoded(Image.new("RGB", (10 + 10 * number, 20))) for number in range(8)]
    files = [("file", (f"{number}.png", image, "image/png")) for number, image in enumerate(images)]
    widths = [each["width"] for each in client.post(PREDICT, files=files).json()["predictions"]]
    assert widths == [10, 20, 30, 40, 50, 60, 70, 80]
    instances = [{"b64": base64.b64encode(image).decode()} for image in reversed(images)]
    widths = [each["width"] for each in client.post(PREDICT, json={"instances": instances}).json()["predictions"]]
    assert widths == [80, 70, 60, 50, 40, 30, 20, 10]


def test_options_are_obeyed(client):
    classes = client.post(f"{PREDICT}?top_k=3", content=PHOTO, headers=JPEG).json()["predictions"][0]["classes"]
    assert len(classes) == 3
    boxes = client.post(f"{DETECT}?score_threshold=0&max_detections=2", content=PHOTO, headers=JPEG)
    assert len(boxes.json()["predictions"][0]["detections"]) == 2
    many = client.post(f"{PREDICT}?top_k=5000", content=PHOTO, headers=JPEG).json()["predictions"][0]["classes"]
    assert len(many) == 1000


def test_a_request_has_so_many_detections_at_most(client):
    files = [("file", (f"{number}.jpg", PHOTO, "image/jpeg")) for number in range(4)]
    answer = client.post(f"{DETECT}?score_threshold=0&max_detections=30000", files=files)
    assert "120000 detections" in assert_error(answer, 400, "INVALID_REQUEST")


def test_who_does_not_ask_for_html_is_told_that_the_server_lives(client):
    for accept in ("*/*", "application/json"):
        answer = client.get("/", headers={"Accept": accept})
        assert (answer.status_code, answer.json()) == (200, {"status": "alive"})
    browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    assert client.get("/", headers={"Accept": browser}).headers["content-type"].startswith("text/html")


def test_a_model_says_its_task_and_its_labels(client):
    said = client.get("/v1/models/yolov8n/labels").json()
    assert {**said, "labels": said["labels"][:2]} == {
        "name": "yolov8n",
        "task": "detect",
        "finds": "objects",
        "labels": ["person", "bicycle"],
    }
    assert client.get("/v2/models/yolov8n").json()["parameters"]["labels"] == said["labels"]
    best = client.post(PREDICT, content=PHOTO, headers=JPEG).json()["predictions"][0]["classes"][0]
    assert client.get("/v1/models/resnet18/labels").json()["labels"][best["class_id"]] == best["label"]
    assert_error(client.get("/v1/models/none/labels"), 404, "MODEL_NOT_FOUND")


def _png_header(width, height):
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        pytest.param(b"", 400, "INVALID_REQUEST", id="an empty body"),
        pytest.param(b"<!DOCTYPE html><html></html>", 422, "INVALID_IMAGE", id="HTML named .jpg"),
        pytest.param(PHOTO[: len(PHOTO) // 2], 422, "INVALID_IMAGE", id="a truncated JPEG"),
        pytest.param(b"\0" * 1000, 422, "INVALID_IMAGE", id="zeros"),
        pytest.param(_png_header(0, 0), 422, "INVALID_IMAGE", id="an image without pixels"),
        pytest.param(_png_header(10_000, 6_000), 413, "IMAGE_TOO_LARGE", id="a 60-megapixel PNG"),
    ],
)
def test_a_body_that_is_no_good_image(client, content, status, code):
    assert_error(client.post(PREDICT, content=content, headers=JPEG), status, code)


def test_one_bad_image_of_several_fails_the_request_and_nothing_else(client):
    files = [("file", ("a.jpg", PHOTO)), ("file", ("b.jpg", b"<html>")), ("file", ("c.jpg", PHOTO))]
    assert_error(client.post(PREDICT, files=files), 422, "INVALID_IMAGE")
    assert client.post(PREDICT, content=PHOTO, headers=JPEG).status_code == 200


def test_too_many_images(client):
    files = [("file", (f"{number}.jpg", PHOTO)) for number in range(9)]
    assert "8" in assert_error(client.post(PREDICT, files=files), 400, "INVALID_REQUEST")


def test_a_body_that_is_too_large(client):
    assert_error(client.post(PREDICT, content=bytes(21 * 2**20), headers=JPEG), 413, "BODY_TOO_LARGE")


def test_a_body_that_is_too_large_and_does_not_say_so(client):
    def chunks():
        for _ in range(21):
            yield bytes(2**20)

    assert_error(client.post(PREDICT, content=chunks(), headers=JPEG), 413, "BODY_TOO_LARGE")


MULTIPART = "multipart/form-data; boundary=b"
HALF = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n' + PHOTO[:1000]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        pytest.param(MULTIPART, HALF, id="half a multipart"),
        pytest.param(MULTIPART, HALF + b"\r\n--b\r\n", id="a multipart that ends at a boundary"),
        pytest.param(MULTIPART, b"--b--\r\n", id="a multipart without parts"),
        pytest.param(MULTIPART, b"no boundary here", id="a multipart without its boundary"),
        pytest.param("multipart/form-data", HALF + b"\r\n--b--\r\n", id="a multipart that names no boundary"),
        pytest.param(MULTIPART, b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n--b--\r\n', id="no file"),
        pytest.param(MULTIPART, b"--b\r\n\r\nbytes\r\n--b--\r\n", id="a part without headers"),
        pytest.param(
            MULTIPART,
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n\r\n--b--\r\n',
            id="an empty file",
        ),
    ],
)
def test_multipart_that_makes_no_sense(client, content_type, body):
    answer = client.post(PREDICT, content=body, headers={"Content-Type": content_type})
    assert_error(answer, 400, "INVALID_REQUEST")


@pytest.mark.parametrize("content_type", ["text/plain", "video/mp4", "nonsense"])
def test_a_content_type_that_is_not_read(client, content_type):
    answer = client.post(PREDICT, content=PHOTO, headers={"Content-Type": content_type})
    assert "image/jpeg" in assert_error(answer, 415, "UNSUPPORTED_MEDIA_TYPE")


UNSAID: tuple[dict[str, str], ...] = (
    {},
    {"Content-Type": "application/octet-stream"},
    {"Content-Type": "application/x-www-form-urlencoded"},
)


@pytest.mark.parametrize("said", UNSAID)
def test_the_first_bytes_decide_where_the_content_type_says_nothing(client, said):
    expected = client.post(PREDICT, content=PHOTO, headers=JPEG).json()
    assert client.post(PREDICT, content=PHOTO, headers=said).json() == expected
    instances = json.dumps({"instances": [{"b64": base64.b64encode(PHOTO).decode()}]})
    assert client.post(PREDICT, content=instances, headers=said).status_code == 200
    other = client.post(PREDICT, content=b"\0\0\0\x1cftypavif" + bytes(64), headers=said)
    assert "AVIF" in assert_error(other, 422, "INVALID_IMAGE")


def test_a_form_of_fields_is_no_image(client):
    answer = client.post(PREDICT, data={"file": "cat.jpg"})
    assert "image/jpeg" in assert_error(answer, 415, "UNSUPPORTED_MEDIA_TYPE")
    assert_error(client.post(PREDICT, content=b"file=cat.jpg"), 422, "INVALID_IMAGE")


GETS = (
    *LIVE,
    *READY,
    "/metrics",
    "/",
    "/v1/models",
    "/docs",
    "/openapi.json",
    "/v1/stats/stream",
)


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_its_body(client, path):
    with client.stream("GET", path) as answer:
        expected = answer.status_code, answer.headers["content-type"]
    answer = client.head(path)
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (*expected, b"")
    assert client.get("/v2/health/live").status_code == 200  # On the same connection.


def test_head_of_what_is_not_there(client):
    answer = client.head("/nothing")
    assert (answer.status_code, answer.content) == (404, b"")
    assert client.head(PREDICT).status_code == 405


def test_trace_is_never_allowed(client):
    for path in ("/v2/health/live", PREDICT, "/v2/repository/index"):
        assert_error(client.request("TRACE", path), 405, "METHOD_NOT_ALLOWED")


@pytest.mark.parametrize("path", ["POST " + PREDICT, "GET /v2/health/live"])
def test_a_connection_of_http_1_0_stays_open_for_who_asks_for_it(service, path):
    address = httpx.URL(service.url)
    body = PHOTO if path.startswith("POST") else b""
    head = f"{path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((address.host, address.port)) as connection:
        connection.settimeout(30)
        for asked in ("Connection: Keep-Alive\r\n", ""):
            connection.sendall(f"{head}{asked}\r\n".encode() + body)
            received = connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")
            assert (b"connection: keep-alive" in received) == bool(asked)
        while received := connection.recv(65536):
            pass


@pytest.mark.parametrize("name", ["resnet19", "..", "%2e%2e", "a" * 300, "yolov8n%00"])
def test_an_unknown_model(client, name):
    answer = client.post(f"/v1/models/{name}:predict", content=PHOTO, headers=JPEG)
    if answer.json()["code"] != "NOT_FOUND":  # Dots are resolved by the client: then it is no path of ours.
        assert "resnet18, yolov8n" in assert_error(answer, 404, "MODEL_NOT_FOUND")


@pytest.mark.parametrize("path", ["/nothing", "/v1/models/resnet18/explain", "/v3"])
def test_an_unknown_path(client, path):
    assert "/docs" in assert_error(client.get(path), 404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", PREDICT),
        ("DELETE", PREDICT),
        ("PUT", PREDICT),
        ("POST", "/v1/models"),
        ("POST", "/v2/health/ready"),
        ("DELETE", "/metrics"),
    ],
)
def test_a_wrong_method(client, method, path):
    answer = client.request(method, path)
    assert_error(answer, 405, "METHOD_NOT_ALLOWED")
    assert answer.headers["allow"]


def test_what_is_served(client):
    models = {model["name"]: model for model in client.get("/v1/models").json()["models"]}
    assert set(models) == {"resnet18", "yolov8n"}
    assert models["resnet18"]["task"] == "classify"
    assert models["resnet18"]["classes"] == 1000
    assert models["yolov8n"]["input_shape"] == [640, 640, 3]
    [served_on] = models["yolov8n"]["served_on"]
    assert (served_on["device"], served_on["engine"], served_on["precision"]) == ("cpu:0", "eager", "fp32")
    assert served_on["batch_sizes"] == [1, 2, 4]
    assert served_on["operators"] == {}
    [device] = client.get("/v1/devices").json()["devices"]
    assert (device["device"], device["vendor"], device["ready"]) == ("cpu:0", "cpu", True)


def test_metrics_count_what_happened(client):
    def value(line):
        found = re.search(rf"^{re.escape(line)} ([\d.e+-]+)$", client.get("/metrics").text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    lines = {
        'anychip_requests_total{code="OK",model="resnet18"}': 2,
        'anychip_requests_total{code="INVALID_IMAGE",model="resnet18"}': 1,
        'anychip_request_seconds_count{model="resnet18"}': 2,
        'anychip_stage_seconds_count{model="resnet18",stage="infer"}': 2,
        'anychip_batch_size_sum{device="cpu:0",model="resnet18"}': 2,
    }
    before = {line: value(line) for line in lines}
    for content in (PHOTO, PHOTO, b"nothing"):
        client.post(PREDICT, content=content, headers=JPEG)
    assert {line: value(line) - before[line] for line in lines} == lines
    assert value('anychip_worker_up{device="cpu:0"}') == 1
    assert value('anychip_images_in_flight{model="resnet18"}') == 0
    assert value('anychip_worker_resident_bytes{device="cpu:0"}') > 10_000_000
    info = 'anychip_model_info{device="cpu:0",engine="eager",model="resnet18",precision="fp32",weights="random"}'
    assert value(info) == 1


def test_unknown_models_make_no_metric(client):
    client.post("/v1/models/surprise:predict", content=PHOTO, headers=JPEG)
    assert "surprise" not in client.get("/metrics").text


def test_the_process_that_forks_decoders_shares_what_the_server_has_imported(service):
    (fork_server,) = service.named("fork-decoders").values()
    memory = fork_server.memory_full_info()
    assert memory.uss < memory.rss / 3, "torch alone is 250 MB of a process that imports it by itself"
