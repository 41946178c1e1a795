"""Clients of other servers, unchanged: what cameras' software sends to DeepStack, and Ultralytics' own client."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from models.sample import IMAGES
from tests.support.clients_page import assert_on_the_page
from tests.support.service_process import running
from tests.support.task_files import written

ROOT = Path(__file__).parents[2]
IMAGE = IMAGES / "detect_1.jpg"
TASKS = ("classify", "pose", "obb", "segment", "detect")


@pytest.fixture(scope="module")
def service(tmp_path_factory, port):
    folder = tmp_path_factory.mktemp("files")
    models = ",".join(["yolov8n", *(f"{task}={written(folder, task)}" for task in TASKS)])
    options = ("--weights", "sample", "--engine", "eager", "--precision", "fp32", "--batch-sizes", "1")
    options += ("--grpc-port", str(port))
    folder = tmp_path_factory.mktemp("clients")
    with running(folder, "--models", models, *options, "--compat", "deepstack,ultralytics,x-anylabeling") as service:
        yield service


def image():
    return {"image": ("frame.jpg", IMAGE.read_bytes(), "image/jpeg")}


def test_deepstack_has_other_models_scenes_and_errors_in_its_own_form(service):
    with service.client() as client:
        assert client.post("/v1/vision/custom/list").json()["models"] == ["yolov8n", *TASKS]
        assert client.post("/v1/vision/custom/yolov8n", files=image()).json()["success"]
        assert set(client.post("/v1/vision/scene", files=image()).json()) >= {"success", "label", "confidence"}
        for path, files, status in (
            ("/v1/vision/custom/none", image(), 400),
            ("/v1/vision/detection", {"image": ("a.jpg", b"no image")}, 400),
            ("/v1/vision/detection", None, 400),
        ):
            refused = client.post(path, files=files)
            assert refused.status_code == status
            assert refused.json()["success"] is False
            assert refused.json()["error"]
        wrong = client.post("/v1/vision/detection", files=image(), data={"min_confidence": "7"})
        assert "min_confidence" in wrong.json()["error"]


def labelled(client, model, **params):
    encoded = base64.b64encode(IMAGE.read_bytes()).decode()
    body = {"model": model, "image": f"data:image/png;base64,{encoded}", "params": params}
    return client.post("/v1/predict", json=body)


def test_x_anylabeling_has_its_models_and_ours(service):
    with service.client() as client:
        listed = client.get("/v1/models").json()
        assert [each["name"] for each in listed["models"]] == list(listed["data"])
        assert listed["data"]["pose"]["display_name"] == "pose"
        labels = client.get("/v1/models/yolov8n/labels").json()["labels"]
        assert listed["data"]["yolov8n"]["classes"] == labels
        assert "button_classes_filter" in {each["name"] for each in listed["data"]["yolov8n"]["widgets"]}
        assert client.get("/v1/models/pose/info").json()["success"]
        assert client.get("/health").json()["success"]


def test_x_anylabeling_is_told_what_is_wrong(service):
    with service.client() as client:
        missing = labelled(client, "none").json()
        assert missing["error"]["code"] == "MODEL_NOT_FOUND"
        for wrong in ({"conf_threshold": 7}, {"filter_classes": "cross"}, {"filter_classes": [1]}):
            assert labelled(client, "yolov8n", **wrong).json()["error"]["code"] == "INVALID_REQUEST"
        for body in (b"no JSON", b"[]", b'{"model": "yolov8n", "image": "!", "params": {}}'):
            refused = client.post("/v1/predict", content=body)
            assert (refused.status_code, refused.json()["success"]) == (200, False)


ASK = """
import json, sys
from ultralytics import YOLO
answers = {}
for way, address in (("http", sys.argv[1]), ("grpc", sys.argv[3])):
    for model, task in (("yolov8n", "detect"), ("detect", "detect"), ("pose", "pose"), ("obb", "obb")):
        [result] = YOLO(f"{way}://{address}/{model}", task=task).predict(sys.argv[2], conf=0.3, verbose=False)
        found = json.loads(result.to_json())
        assert answers.setdefault(model, found) == found, (way, model, found)
import numpy as np
import tritonclient.http as triton
tensor = triton.InferInput("image", [1], "BYTES")
tensor.set_data_from_numpy(np.array([open(sys.argv[2], "rb").read()], dtype=np.object_))
answers["triton"] = triton.InferenceServerClient(sys.argv[1]).infer("detect", [tensor]).as_numpy("boxes").tolist()
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def asked(service, port, tmp_path_factory):
    pytest.importorskip("ultralytics")
    packages = [str(each) for each in (ROOT / ".venv-clients").glob("lib/python3.*/site-packages")]
    if not packages:
        pytest.skip("there is no environment with clients: tests/environments/clients_environment.py makes it")
    folder = tmp_path_factory.mktemp("ultralytics")
    # Behind everything else, so that only the client itself comes from there.
    script = f"import sys; sys.path += {packages!r}\n{ASK}"
    settings = {"YOLO_CONFIG_DIR": str(folder), "YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, service.url.removeprefix("http://"), str(IMAGE), f"127.0.0.1:{port}"],
        env={**os.environ, **settings},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "ANSWERS" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.partition("ANSWERS")[2])


def test_ultralytics_own_client_finds_what_we_find(service, asked):
    assert_on_the_page("Ultralytics", version("ultralytics"), ["`http://` and `grpc://`: detect", "pose", "obb"])
    with service.client() as client:
        answer = client.post("/v1/models/yolov8n:predict?score_threshold=0.3", files=image())
    ours = answer.json()["predictions"][0]["detections"]
    theirs = asked["yolov8n"]
    assert len(theirs) == len(ours) > 2
    for mine, found in zip(ours, theirs, strict=True):
        assert (found["name"], found["confidence"]) == (mine["label"], pytest.approx(mine["score"], abs=2e-3))
        assert [found["box"][name] for name in mine["box"]] == pytest.approx([*mine["box"].values()], abs=0.5)


def test_ultralytics_own_client_has_poses_and_turned_boxes(service, asked):
    with service.client() as client:
        pose, obb = (
            client.post(f"/v1/models/{model}:predict", files=image()).json()["predictions"][0]
            for model in ("pose", "obb")
        )
    [theirs] = asked["pose"]
    [mine] = pose["detections"]
    assert theirs["name"] == mine["label"] == "thing"
    assert theirs["keypoints"]["x"] == pytest.approx([point["x"] for point in mine["keypoints"]], abs=0.5)
    [theirs] = asked["obb"]
    [mine] = obb["detections"]
    corners = {(round(x), round(y)) for x, y in mine["corners"]}
    assert {(round(theirs["box"][f"x{n}"]), round(theirs["box"][f"y{n}"])) for n in range(1, 5)} == corners
    # A network that wants other numbers than pixels in 0..1 is none for this client.
    with service.client() as client:
        for model in ("yolov8n", "pose", "classify"):
            metadata, config = (client.get(f"/v2/models/{model}{path}").json() for path in ("", "/config"))
            for listed, configured in (("inputs", "input"), ("outputs", "output")):
                assert {each["name"]: each["shape"] for each in metadata[listed]} == {
                    each["name"]: [-1, *each["dims"]] for each in config[configured]
                }
        assert [each["name"] for each in metadata["inputs"]] != ["input"]
        assert [each["name"] for each in client.get("/v2/models/classify/config").json()["input"]] != ["input"]


def test_both_clients_have_the_boxes_of_an_exported_file(service, asked):
    with service.client() as client:
        [mine] = client.post("/v1/models/detect:predict", files=image()).json()["predictions"][0]["detections"]
    box = pytest.approx([*mine["box"].values()], abs=0.5)
    assert asked["triton"] == [[box]]
    [theirs] = asked["detect"]
    assert (theirs["name"], [theirs["box"][name] for name in mine["box"]]) == ("thing", box)
