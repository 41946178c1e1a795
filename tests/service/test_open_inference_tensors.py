"""A network from a file through the Open Inference Protocol: tensors in, tensors out, over REST and gRPC."""

from __future__ import annotations

import json

import grpc
import numpy as np
import pytest
import torch

from anychip_grpc.messages import message
from tests.support import small_classifier
from tests.support.answers import assert_error, binary
from tests.support.exported_files import INPUTS, OUTPUTS, example, exported, question_answering
from tests.support.grpc_client import arrays_of, infer
from tests.support.images import GREY
from tests.support.service_process import running

INFER = "/v2/models/qa/infer"


@pytest.fixture(scope="module")
def client(tmp_path_factory, port):
    file = exported(tmp_path_factory.mktemp("files"), ".pt2")
    model = f"qa={file}@sha256:{small_classifier.digest_of(file)}"
    options = ("--models", model, "--batch-sizes", "1,2", "--grpc-port", str(port))
    with running(tmp_path_factory.mktemp("service"), *options) as service, service.client() as client:
        client.service = service
        yield client


@pytest.fixture(scope="module")
def given():
    tensors = example(3, 7, 0)
    with torch.inference_mode():
        outputs = question_answering()(*tensors)
    return (
        {name: tensor.numpy() for name, tensor in zip(INPUTS, tensors, strict=True)},
        {name: output.numpy() for name, output in zip(OUTPUTS, outputs, strict=True)},
    )


def tensors_of(inputs):
    return [{"name": name, "datatype": "INT64", "shape": list(array.shape)} for name, array in inputs.items()]


def test_metadata_and_configuration_are_those_of_the_file(client):
    metadata = client.get("/v2/models/qa").json()
    assert [(each["name"], each["datatype"], each["shape"]) for each in metadata["inputs"]] == [
        (name, "INT64", [-1, -1]) for name in INPUTS
    ]
    assert [each["name"] for each in metadata["outputs"]] == list(OUTPUTS)
    config = client.get("/v2/models/qa/config").json()
    assert [(each["name"], each["data_type"], each["dims"]) for each in config["input"]] == [
        (name, "TYPE_INT64", [-1]) for name in INPUTS
    ]
    assert not any(each.get("optional") for each in config["input"]), "all of its inputs are needed"


def test_json_binary_and_grpc_give_what_pytorch_gives(client, port, given):
    inputs, expected = given
    in_json = [{**tensor, "data": inputs[tensor["name"]].tolist()} for tensor in tensors_of(inputs)]
    answer = client.post(INFER, json={"inputs": in_json, "id": "7"}).json()
    assert (answer["id"], [each["name"] for each in answer["outputs"]]) == ("7", list(OUTPUTS))
    for output in answer["outputs"]:
        array = np.array(output["data"], np.float32).reshape(output["shape"])
        np.testing.assert_allclose(array, expected[output["name"]], rtol=1e-4, atol=1e-4)

    sized = [
        {**tensor, "parameters": {"binary_data_size": inputs[tensor["name"]].nbytes}} for tensor in tensors_of(inputs)
    ]
    document = {"inputs": sized, "outputs": [{"name": OUTPUTS[0], "parameters": {"binary_data": True}}]}
    content = b"".join(array.tobytes() for array in inputs.values())
    raw = binary("/v2/models/qa", document, content, post=client.post)
    head = int(raw.headers["inference-header-content-length"])
    [output] = json.loads(raw.content[:head])["outputs"]
    array = np.frombuffer(raw.content[head:], np.float32).reshape(output["shape"])
    np.testing.assert_allclose(array, expected[OUTPUTS[0]], rtol=1e-4, atol=1e-4)

    request = message("ModelInferRequest")(model_name="qa")
    for tensor in tensors_of(inputs):
        request.inputs.add(**tensor)
        request.raw_input_contents.append(inputs[tensor["name"]].tobytes())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name, array in arrays_of(infer(channel, request)).items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-4)


def test_requests_that_make_no_sense(client, given):
    inputs, _ = given
    good = [{**tensor, "data": inputs[tensor["name"]].tolist()} for tensor in tensors_of(inputs)]
    wrong = {
        "missing": good[:1],
        "no input": [*good, {**good[0], "name": "nothing"}],
        "twice": [good[0], good[0]],
        "INT64": [{**good[0], "datatype": "INT32"}, *good[1:]],
        "there is": [{**good[0], "datatype": "BYTES", "data": []}, *good[1:]],
        "shape": [{**good[0], "shape": [21], "data": good[0]["data"]}, *good[1:]],
    }
    for reason, tensors in wrong.items():
        assert reason in assert_error(client.post(INFER, json={"inputs": tensors}), 400, "INVALID_REQUEST")
    raw = client.post(INFER, content=b"12345678", headers={"Inference-Header-Content-Length": "0"})
    assert "raw request" in assert_error(raw, 400, "INVALID_REQUEST")
    raw = client.post(f"{INFER}?timeout=1&timeout=2", content=b"1", headers={"Inference-Header-Content-Length": "0"})
    assert "more than once" in assert_error(raw, 400, "INVALID_REQUEST")
    image = client.post("/v1/models/qa:predict", content=GREY, headers={"Content-Type": "image/jpeg"})
    assert "tensors" in assert_error(image, 400, "INVALID_REQUEST")
