"""Other people's clients, unchanged, each in its environment, as docs/protocols.md has them in its table."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models.sample import IMAGES
from tests.support.clients_page import PAGE, assert_on_the_page
from tests.support.service_process import free_port, running
from tests.support.task_files import written

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ANYCHIP_TEST_CLIENTS_PYTHON") or ROOT / ".venv-clients" / "bin" / "python")
GO = PYTHON.with_name("go")
PERF_ANALYZER = PYTHON.with_name("perf_analyzer")
FRIGATE = os.environ.get("ANYCHIP_TEST_FRIGATE", "")
"""A checkout of blakeblackshear/frigate: no package has it."""
MLFLOW = PYTHON.parents[1] / "mlflow"
IMAGE = IMAGES / "detect_1.jpg"
TASKS = ("classify", "pose", "obb", "segment", "detect")
WAIT_S = 120

outside = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"make clients-environment makes what is missing here: {PYTHON}"
)
perf_analyzer = pytest.mark.skipif(
    not PERF_ANALYZER.exists(), reason="perf_analyzer is not there: tests/environments/make.py says why"
)
PERF_RAN = ["REST and gRPC: images and pixels from a file", "made-up pixels", "tensors in batches", "streams"]
CHILD = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def serve(folder, *options, models, port):
    options += ("--weights", "sample", "--engine", "eager", "--precision", "fp32", "--batch-sizes", "1,2")
    return running(folder, "--models", models, *options, "--grpc-port", str(port))


@pytest.fixture(scope="module")
def service(tmp_path_factory, port):
    """Serve a classifier, a detector, a network of tensors, and a file of each of the TASKS."""
    folder = tmp_path_factory.mktemp("files")
    dynamic = ({0: torch.export.Dim("batch", max=64)},)
    program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2, 8),), dynamic_shapes=dynamic)
    torch.export.save(program, folder / "relu.pt2")
    files = ",".join(f"{task}={written(folder, task)}" for task in TASKS)
    models = f"resnet18:random,yolov8n,relu={folder / 'relu.pt2'},{files}"
    compat = ("--trust-exported", "true", "--compat", "deepstack,x-anylabeling")
    with serve(folder, *compat, models=models, port=port) as service:
        yield service


@pytest.fixture(scope="module")
def expected(client):
    return {
        model: client.post(f"/v1/models/{model}:predict", content=IMAGE.read_bytes()).json()["predictions"][0]
        for model in ("resnet18", "yolov8n")
    }


def asked(client, service, port, *example):
    script = ROOT / "tests" / "support" / "other_clients.py"
    command = [PYTHON, script, client, service.url, f"127.0.0.1:{port}", IMAGE, *example]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, env=CHILD)
    assert "REPORT" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.partition("REPORT")[2])


@outside
def test_kserves_sdk(service, port, expected):
    report = asked("kserve", service, port)
    assert report["found"] == dict.fromkeys(("v1", "v2", "grpc"), expected["yolov8n"])
    assert_on_the_page("KServe's SDK", report["version"], report["ran"])


@outside
def test_the_open_inference_groups_clients(service, port, expected):
    for client in ("open_inference_rest", "open_inference_grpc"):
        report = asked(client, service, port)
        assert report["found"].pop("predictions") == expected["yolov8n"]
        if client.endswith("rest"):
            assert report["found"]["pixels"] == {"logits": [1, 1000], "probabilities": [1, 1000], "predictions": [1]}
        name = f"open-inference-{'openapi' if client.endswith('rest') else 'grpc'}"
        assert_on_the_page(name, report["version"], report["ran"])


@outside
def test_deepstacks_clients(service, client, port, expected):
    detections = [each for each in expected["yolov8n"]["detections"] if each["score"] >= 0.45]
    labels = [each["label"] for each in detections]
    best = expected["resnet18"]["classes"][0]
    report = asked("deepstack_python", service, port)
    assert [each["label"] for each in report["found"]["detection"]] == labels
    assert [each["label"] for each in report["found"]["custom"]] == labels
    assert report["found"]["scene"]["label"] == best["label"]
    assert_on_the_page("deepstack-python", report["version"], report["ran"])
    report = asked("deepstack_sdk", service, port)
    assert report["found"] == {"detection": labels, "custom": labels, "scene": best["label"]}
    assert_on_the_page("deepstack-sdk", report["version"], report["ran"])
    for path in ("/v1/status/ping", "/v1/server/status/version"):  # CodeProject.AI's
        said = client.get(path).json()
        assert said["success"]
        assert set(said["version"]) == {"major", "minor", "patch"}


def example_of(word, folder, service):
    """Write the Python block of docs/protocols.md that contains a word, with this service's address."""
    [block] = [each for each in PAGE.split("```python\n")[1:] if word in each.partition("```")[0]]
    file = folder / "example.py"
    file.write_text(block.partition("```")[0].replace("http://127.0.0.1:8000", service.url))
    return file


@outside
def test_the_function_for_cvat(service, port, expected, tmp_path):
    report = asked("cvat", service, port, example_of("cvat_sdk", tmp_path, service))
    found = [
        (each["label"], list(each["box"].values()))
        for each in expected["yolov8n"]["detections"]
        if each["score"] >= 0.4
    ]
    assert [each["label"] for each in report["found"]["boxes"]] == [label for label, _ in found]
    points = [each["points"] for each in report["found"]["boxes"]]
    np.testing.assert_allclose(points, [box for _, box in found], atol=0.02)  # PNG and JPEG of the same pixels.
    assert_on_the_page("CVAT (cvat-sdk)", report["version"], report["ran"])


@outside
def test_the_backend_for_label_studio(service, port, expected, tmp_path):
    report = asked("label_studio", service, port, example_of("label_studio_ml", tmp_path, service))
    found, wanted = report["found"]["result"], expected["yolov8n"]
    assert [each["value"]["rectanglelabels"] for each in found] == [[each["label"]] for each in wanted["detections"]]
    first, box = found[0]["value"], wanted["detections"][0]["box"]
    assert first["x"] * wanted["width"] / 100 == pytest.approx(box["x1"])
    assert (first["y"] + first["height"]) * wanted["height"] / 100 == pytest.approx(box["y2"])
    assert_on_the_page("Label Studio (label-studio-ml)", report["version"], report["ran"])


@pytest.mark.skipif(
    not [*PYTHON.parents[1].glob("lib/python3.*/site-packages/anylabeling")] or find_library("EGL") is None,
    reason="X-AnyLabeling is not there (tests/environments/make.py), or what Qt loads (libegl1)",
)
def test_x_anylabeling(service, client, port, expected):
    found = (report := asked("x_anylabeling", service, port))["found"]
    assert {"resnet18", "yolov8n"} <= set(found["models"])
    assert found["classes"] == client.get("/v1/models/yolov8n/labels").json()["labels"]
    assert found["all"] == found["again"]
    assert [(label, kind) for label, kind, _ in found["all"]] == [
        (each["label"], "rectangle") for each in expected["yolov8n"]["detections"]
    ]
    first = expected["yolov8n"]["detections"][0]["box"]
    assert found["all"][0][2][::2] == [[first["x1"], first["y1"]], [first["x2"], first["y2"]]]
    chosen = found["all"][-1][0]
    assert 0 < len(found["some"]) < len(found["all"])
    assert found["some"] == [each for each in found["all"] if each[0] == chosen]
    assert_on_the_page("X-AnyLabeling", report["version"], report["ran"])


@pytest.mark.skipif(not GO.exists(), reason=f"Go is not there, which is a package of Python's registry, too: {GO}")
def test_go_posts_an_image_with_any_content_type(service, expected, tmp_path):
    environment = {
        **CHILD,
        "GOCACHE": str(PYTHON.parents[1] / "go-cache"),
        "GOPATH": str(tmp_path),
        "GOTOOLCHAIN": "local",
    }
    post = tmp_path / "post"
    build = [GO, "build", "-o", post, ROOT / "tests" / "support" / "post.go"]
    subprocess.run(build, check=True, timeout=WAIT_S, env=environment)
    for kind in ("image/jpeg", "application/octet-stream", ""):
        command = [post, f"{service.url}/v1/models/yolov8n:predict", IMAGE, kind]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout
        status, _, body = printed.partition(" ")
        assert status == "200", printed
        assert json.loads(body)["predictions"] == [expected["yolov8n"]]
    told = subprocess.run([GO, "version"], capture_output=True, text=True, check=True, env=environment).stdout.split()
    ran = ["`http.Post` of an image with its content type", "with octet-stream", "with none"]
    assert_on_the_page("Go (net/http)", told[2].removeprefix("go"), ran)


def measured(model, address, *options):
    """Run perf_analyzer with eight requests and return its output."""
    command = [PERF_ANALYZER, "-m", model, "-u", address, "--request-count", "8", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, env=CHILD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Throughput" in done.stdout
    return done.stdout


@perf_analyzer
def test_perf_analyzer_drives_images_and_tensors(service, port, tmp_path):
    image = IMAGE.read_bytes()
    element = base64.b64encode(len(image).to_bytes(4, "little") + image).decode()
    pixels = base64.b64encode(bytes(224 * 224 * 3)).decode()
    for name, content in (("image", element), ("pixels", pixels)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"data": [{name: {"b64": content}}]}))
    http, grpc = service.url.removeprefix("http://"), f"127.0.0.1:{port}"
    for address, way in ((http, ()), (grpc, ("-i", "grpc"))):
        for name in ("image", "pixels"):
            measured("resnet18", address, *way, "--input-data", str(tmp_path / f"{name}.json"))
        printed = measured("relu", address, *way, "-b", "3")
        assert "Inference count: " in printed
    measured("relu", grpc, "-i", "grpc", "--streaming", "-b", "2")
    [folder] = (PYTHON.parents[1] / "perf_analyzer").glob("perf_analyzer-*.dist-info")
    version = folder.name.removeprefix("perf_analyzer-").removesuffix(".dist-info")
    assert_on_the_page("perf_analyzer", version, PERF_RAN)


@pytest.fixture(scope="module")
def view_port():
    return free_port()


@pytest.fixture(scope="module")
def view(tmp_path_factory, view_port):
    """Serve the classifier in the view for clients that want one input and one output."""
    folder = tmp_path_factory.mktemp("view")
    with serve(folder, "--compat", "image-client", models="resnet18:random", port=view_port) as service:
        yield service


@perf_analyzer
def test_perf_analyzer_makes_up_images_where_one_input_is_listed(view, view_port):
    http, grpc = view.url.removeprefix("http://"), f"127.0.0.1:{view_port}"
    measured("resnet18", http, "-b", "2")
    measured("resnet18", grpc, "-i", "grpc")


@outside
@pytest.mark.parametrize("checkout", [(), (FRIGATE,)], ids=["the same messages", "its own code"])
def test_frigates_zmq_detector(service, tmp_path, expected, checkout):
    """Frigate's frames in, its tensor out, by deploy/upstream/frigate/anychip_zmq.py."""
    if checkout == ("",):
        pytest.skip("no package has Frigate: ANYCHIP_TEST_FRIGATE names a checkout of blakeblackshear/frigate")
    with Image.open(IMAGE) as image:
        pixels = np.asarray(image.convert("RGB"))
    height, width, _ = pixels.shape
    (tmp_path / "frame").write_bytes(pixels.tobytes())
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    bridge = [PYTHON, ROOT / "deploy" / "upstream" / "frigate" / "anychip_zmq.py", "--bind", endpoint]
    running_bridge = subprocess.Popen([*bridge, "--url", service.url, "--timeout-ms", "60000"], env=CHILD)
    try:
        script = ROOT / "tests" / "support" / "frigate_client.py"
        command = [PYTHON, script, endpoint, tmp_path / "frame", str(height), str(width), *checkout]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, env=CHILD)
    finally:
        running_bridge.terminate()
        running_bridge.wait(WAIT_S)
    assert "REPORT" in done.stdout, done.stdout + done.stderr
    report = json.loads(done.stdout.partition("REPORT")[2])
    assert report["refused"] == [[0.0] * 6] * 20
    detections = expected["yolov8n"]["detections"]
    assert 0 < len(detections) <= 20
    assert report["rows"][len(detections) :] == [[0.0] * 6] * (20 - len(detections))
    for row, detection in zip(report["rows"], detections, strict=False):
        left, top, right, bottom = (detection["box"][side] for side in ("x1", "y1", "x2", "y2"))
        assert row[0] == detection["class_id"]
        assert row[1] == pytest.approx(detection["score"], abs=1e-3)
        assert row[2:] == pytest.approx([top / height, left / width, bottom / height, right / width], abs=5e-3)


@pytest.mark.skipif(not MLFLOW.exists(), reason=f"make clients-environment makes what is missing here: {MLFLOW}")
def test_mlflow_deployments(service, tmp_path, expected):
    """MLflow's own command, with the installed package of deploy/upstream/mlflow as its plug-in."""
    sources = shutil.copytree(ROOT / "deploy" / "upstream" / "mlflow", tmp_path / "sources")
    install = (sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation")
    subprocess.run([*install, "--target", tmp_path / "plugin", sources], check=True, capture_output=True)
    image = base64.b64encode(IMAGE.read_bytes()).decode()
    (tmp_path / "images.json").write_text(json.dumps([{"image": image}] * 2))
    found_at = {"PYTHONPATH": (tmp_path / "plugin", MLFLOW), "PATH": (tmp_path / "bin", os.environ["PATH"])}
    environment = CHILD | {name: os.pathsep.join(map(str, folders)) for name, folders in found_at.items()}

    def mlflow(command, *options, status=0):
        words = [PYTHON, "-m", "mlflow", "deployments", command, "--target", f"anychip:{service.url}", *options]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=WAIT_S, env=environment)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "anychip:http://" in mlflow("help")
    assert all(name in mlflow("list") for name in ("resnet18", "yolov8n", "relu"))
    assert "name: yolov8n" in mlflow("get", "--name", "yolov8n")
    answers = tmp_path / "answers.json"
    mlflow("predict", "--name", "yolov8n", "-I", tmp_path / "images.json", "-O", answers)
    for found in json.loads(answers.read_text())["predictions"]:
        assert [each["label"] for each in found["detections"]] == [
            each["label"] for each in expected["yolov8n"]["detections"]
        ]
    assert "MODEL_NOT_FOUND" in mlflow("predict", "--name", "cats", "-I", tmp_path / "images.json", status=1)
    assert "where it starts" in mlflow("delete", "--name", "yolov8n", status=1)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "anychip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "bin" / "anychip").chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.onnx").touch()
    said = mlflow("run-local", "--name", "net", "-m", tmp_path / "model", "-C", "port=0")
    assert f"serve --models net={tmp_path / 'model' / 'model.onnx'} --port 0" in said


def image():
    return {"image": ("frame.jpg", IMAGE.read_bytes(), "image/jpeg")}


def test_deepstack_has_other_models_scenes_and_errors_in_its_own_form(client):
    assert client.post("/v1/vision/custom/list").json()["models"] == ["resnet18", "yolov8n", *TASKS]
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


def test_x_anylabeling_has_its_models_and_ours(client):
    listed = client.get("/v1/models").json()
    of_images = [each["name"] for each in listed["models"] if each["name"] != "relu"]  # That takes tensors.
    assert of_images == list(listed["data"])
    assert listed["data"]["pose"]["display_name"] == "pose"
    labels = client.get("/v1/models/yolov8n/labels").json()["labels"]
    assert listed["data"]["yolov8n"]["classes"] == labels
    assert "button_classes_filter" in {each["name"] for each in listed["data"]["yolov8n"]["widgets"]}
    assert client.get("/v1/models/pose/info").json()["success"]
    assert client.get("/health").json()["success"]


def test_x_anylabeling_is_told_what_is_wrong(client):
    missing = labelled(client, "none").json()
    assert missing["error"]["code"] == "MODEL_NOT_FOUND"
    for wrong in ({"conf_threshold": 7}, {"filter_classes": "cross"}, {"filter_classes": [1]}):
        assert labelled(client, "yolov8n", **wrong).json()["error"]["code"] == "INVALID_REQUEST"
    for body in (b"no JSON", b"[]", b'{"model": "yolov8n", "image": "!", "params": {}}'):
        refused = client.post("/v1/predict", content=body)
        assert (refused.status_code, refused.json()["success"]) == (200, False)
