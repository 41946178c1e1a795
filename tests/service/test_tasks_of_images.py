"""Embeddings, semantic segmentation, depth and regression, served from small files: every protocol says the same."""

from __future__ import annotations

import base64
import json

import grpc
import numpy as np
import pytest

from app.http.schemas import PredictAnswer
from models.sample import IMAGES
from tests.support.answers import infer_images, outputs_of
from tests.support.grpc_client import arrays_of, image_request, infer, texts_of
from tests.support.service_process import running
from tests.support.task_files import OF_IMAGES, SIDE, answers, written

IMAGE = IMAGES / "detect_1.jpg"  # 640 x 480.
OPTIONS = ("--device", "cpu", "--engine", "eager", "--precision", "fp32", "--batch-sizes", "1,2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return [written(folder, task) for task in OF_IMAGES]


@pytest.fixture(scope="module")
def service(files, port, tmp_path_factory):
    options = ("--models", ",".join(map(str, files)), "--grpc-port", str(port), *OPTIONS)
    with running(tmp_path_factory.mktemp("service"), *options) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def channel(service, port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


def predicted(client, task, query=""):
    answer = client.post(f"/v1/models/{task}:predict{query}", content=IMAGE.read_bytes()).json()
    PredictAnswer.model_validate(answer)
    [prediction] = answer["predictions"]
    assert (prediction.pop("width"), prediction.pop("height")) == (640, 480)
    return prediction


def test_each_answers_in_its_form(client):
    near = {"abs": 1e-4}
    assert predicted(client, "embed") == {"embedding": pytest.approx([3, 4], **near)}
    assert predicted(client, "embed", "?normalize=l2") == {"embedding": pytest.approx([0.6, 0.8], **near)}
    encoded = predicted(client, "embed", "?encoding=base64")["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == pytest.approx([3, 4], **near)
    assert predicted(client, "regress") == {
        "values": {"nothing": pytest.approx(31.5, **near), "thing": pytest.approx(1.75, **near)}
    }
    found = predicted(client, "segment_semantic")
    assert [(each["label"], each["area"]) for each in found["areas"]] == [("nothing", 153_600), ("thing", 153_600)]
    assert found["class_map"]["size"] == [480, 640]
    assert "mask" in predicted(client, "segment_semantic", "?masks=rle")["areas"][1]
    found = predicted(client, "depth")["depth"]
    assert (found["size"], found["min"], found["max"]) == ([SIDE, SIDE], *(pytest.approx(n, **near) for n in (1, 5)))
    assert "float32" in predicted(client, "depth", "?encoding=base64")["depth"]


@pytest.mark.parametrize("task", OF_IMAGES)
def test_every_protocol_says_the_same(client, channel, task):
    image = IMAGE.read_bytes()
    instances = {"instances": [{"b64": base64.b64encode(image).decode()}]}
    [wanted] = client.post(f"/v1/models/{task}:predict", json=instances).json()["predictions"]
    assert client.post(f"/predictions/{task}", content=image).json() == wanted
    described = client.get(f"/v2/models/{task}").json()
    [spec, _] = described["outputs"]
    assert described["parameters"]["task"] == task
    _, rest = outputs_of(infer_images(client, f"/v2/models/{task}", image))
    rpc = infer(channel, image_request(image, model=task))
    assert json.loads(rest["predictions"][0]) == json.loads(texts_of(rpc, "predictions")[0]) == wanted
    tensor = rest[spec["name"]]
    assert [-1, *tensor.shape[1:]] == spec["shape"]
    if spec["datatype"] == "FP32":
        np.testing.assert_array_equal(arrays_of(rpc)[spec["name"]], tensor)
        np.testing.assert_allclose(tensor[0], answers(task).numpy().reshape(tensor.shape[1:]), atol=1e-4)
    else:
        np.testing.assert_array_equal(tensor[0], np.repeat([[0] * 32 + [1] * 32], SIDE, axis=0))


def test_parameters_of_the_open_inference_protocol_are_those_of_predict(client):
    _, found = outputs_of(infer_images(client, "/v2/models/embed", IMAGE.read_bytes(), parameters={"normalize": "l2"}))
    assert found["embedding"][0].tolist() == pytest.approx([0.6, 0.8], abs=1e-4)
