"""The gRPC service: what it says is what REST says, errors and deadlines included."""

from __future__ import annotations

import asyncio
import json

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from anychip_grpc.messages import METHODS, SERVICE, message
from app.errors import ERRORS
from deploy import generate_rpc
from tests.support.answers import element, infer_images, outputs_of
from tests.support.grpc_client import arrays_of, call, image_request, infer, method, texts_of
from tests.support.load import WAIT_S, until
from tests.support.photographs import FILES

PHOTO = FILES[0].read_bytes()

pytestmark = pytest.mark.xdist_group("shared service")


@pytest.fixture(scope="module")
def channel(service, grpc_port):
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=unlimited) as channel:
        yield channel


def test_health_and_metadata(channel, client):
    assert call(channel, "ServerLive").live
    assert call(channel, "ServerReady").ready
    assert call(channel, "ModelReady", name="resnet18", version="1").ready
    assert not call(channel, "ModelReady", name="resnet18", version="2").ready
    assert not call(channel, "ModelReady", name="nothing").ready
    server = call(channel, "ServerMetadata")
    rest = client.get("/v2").json()
    assert (server.name, server.version, list(server.extensions)) == tuple(rest.values())
    for name in ("resnet18", "yolov8n"):
        rest = client.get(f"/v2/models/{name}").json()
        metadata = call(channel, "ModelMetadata", name=name)
        assert (metadata.name, metadata.platform, list(metadata.versions)) == (name, rest["platform"], rest["versions"])
        for ours, theirs in ((metadata.inputs, rest["inputs"]), (metadata.outputs, rest["outputs"])):
            tensors = [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in ours]
            assert tensors == theirs
        config = call(channel, "ModelConfig", name=name).config
        assert (config.max_batch_size, config.dynamic_batching.preferred_batch_size) == (8, [1, 2, 4])
        # Refuses a name that the message does not have.
        assert config == json_format.ParseDict(client.get(f"/v2/models/{name}/config").json(), type(config)())


@pytest.mark.parametrize("model", ["resnet18", "yolov8n"])
def test_a_jpeg_gives_the_predictions_of_rest_to_the_bit(channel, client, model):
    """One image a request: what else is in a batch changes the last bits of its sums."""
    _, rest = outputs_of(infer_images(client, f"/v2/models/{model}", PHOTO, parameters={"binary_data_output": True}))
    response = infer(channel, image_request(PHOTO, model=model, id="mine"))
    assert (response.model_name, response.model_version, response.id) == (model, "1", "mine")
    assert response.parameters["weights"].string_param == "random"
    assert texts_of(response, "predictions") == rest["predictions"]
    arrays = arrays_of(response)
    assert set(arrays) == set(rest) - {"predictions"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, rest[name])
    short = client.post(f"/v1/models/{model}:predict", content=PHOTO, headers={"Content-Type": "image/jpeg"}).json()
    assert json.loads(texts_of(response, "predictions")[0]) == short["predictions"][0]


def test_contents_in_place_of_raw_bytes(channel):
    pixels = np.random.default_rng(0).integers(0, 256, (1, 224, 224, 3), dtype=np.uint8)
    raw = message("ModelInferRequest")(model_name="resnet18")
    raw.inputs.add(name="pixels", datatype="UINT8", shape=pixels.shape)
    raw.outputs.add(name="logits")
    typed = message("ModelInferRequest")()
    typed.CopyFrom(raw)
    raw.raw_input_contents.append(pixels.tobytes())
    typed.inputs[0].contents.uint_contents.extend(pixels.reshape(-1).tolist())
    results = [arrays_of(infer(channel, request)) for request in (raw, typed)]
    assert set(results[0]) == {"logits"}
    np.testing.assert_array_equal(results[0]["logits"], results[1]["logits"])
    image = message("ModelInferRequest")(model_name="resnet18")
    image.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.bytes_contents.append(PHOTO)
    assert texts_of(infer(channel, image), "predictions") == texts_of(
        infer(channel, image_request(PHOTO)), "predictions"
    )


def test_a_stream_of_requests(channel):
    good, bad = image_request(PHOTO, id="1"), image_request(b"<html>", id="2")
    answers = list(method(channel, "ModelStreamInfer")(iter([good, bad, good]), timeout=WAIT_S))
    assert [bool(each.error_message) for each in answers] == [False, True, False]
    assert answers[1].infer_response.id == "2"
    assert texts_of(answers[0].infer_response, "predictions") == texts_of(answers[2].infer_response, "predictions")


def refused(request_or_call):
    with pytest.raises(grpc.RpcError) as caught:
        request_or_call()
    error = caught.value
    trailing = dict(error.trailing_metadata() or ())
    return error.code().name, trailing.get("code"), error.details()


def wrong_requests():
    def pixels(shape, content):
        request = message("ModelInferRequest")(model_name="resnet18")
        request.inputs.add(name="pixels", datatype="UINT8", shape=shape)
        request.raw_input_contents.append(content)
        return request

    both = image_request(PHOTO)
    both.inputs[0].contents.bytes_contents.append(PHOTO)
    unknown = image_request(PHOTO)
    unknown.outputs.add(name="nothing")
    empty = message("ModelInferRequest")(model_name="resnet18")
    return {
        "too few bytes": pixels([1, 224, 224, 3], b"123"),
        "a shape that overflows": pixels([2**62, 2**62, 2**62, 3], b"123"),
        "contents twice": both,
        "an unknown output": unknown,
        "no inputs": empty,
        "an element that lies": message("ModelInferRequest").FromString(
            image_request(PHOTO).SerializeToString().replace(element(PHOTO)[:4], b"\xff\xff\xff\xff")
        ),
    }


@pytest.mark.parametrize("what", wrong_requests())
def test_requests_that_make_no_sense(channel, what):
    status, code, details = refused(lambda: infer(channel, wrong_requests()[what]))
    assert (status, code) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert details


def test_errors_have_the_status_of_their_code(channel):
    assert all(hasattr(grpc.StatusCode, kind.grpc) for kind in ERRORS.values())
    assert refused(lambda: infer(channel, image_request(b"<html>")))[:2] == ("INVALID_ARGUMENT", "INVALID_IMAGE")
    assert refused(lambda: infer(channel, image_request(PHOTO, model="nobody")))[:2] == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert refused(lambda: call(channel, "ModelMetadata", name="resnet18", version="7"))[0] == "NOT_FOUND"
    assert refused(lambda: infer(channel, image_request(bytes(21 * 2**20))))[0] == "RESOURCE_EXHAUSTED"


def test_deadlines_of_the_call_and_of_the_request(channel, client):
    expected = {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
    assert refused(lambda: infer(channel, image_request(PHOTO), timeout=0.001))[0] in expected
    soon = (("x-timeout-ms", "0.001"),)
    assert refused(lambda: infer(channel, image_request(PHOTO), metadata=soon))[0] in expected
    late = image_request(PHOTO)
    late.parameters["timeout"].int64_param = 1
    assert refused(lambda: infer(channel, late))[0] in expected
    metrics = client.get("/metrics").text
    assert 'anychip_images_in_flight{model="resnet18"} 0.0' in metrics


def test_health_checking_and_reflection(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert refused(lambda: health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=WAIT_S))[0] == "NOT_FOUND"
    watching = health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()
    reflected = ProtoReflectionDescriptorDatabase(channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(reflected.get_services())
    file = reflected.FindFileContainingSymbol(SERVICE)
    assert {method.name for method in file.service[0].method} == set(METHODS)


def test_repository_over_grpc(channel, client):
    states = {each.name: each.state for each in call(channel, "RepositoryIndex").models}
    assert states == {"resnet18": "READY", "yolov8n": "READY"}
    call(channel, "RepositoryModelUnload", model_name="yolov8n")
    assert refused(lambda: infer(channel, image_request(PHOTO, model="yolov8n")))[:2] == ("UNAVAILABLE", "NOT_READY")
    assert not call(channel, "ModelReady", name="yolov8n").ready
    assert not call(channel, "ServerReady").ready, "what was unloaded is missing"
    assert [each.name for each in call(channel, "RepositoryIndex", ready=True).models] == ["resnet18"]
    assert infer(channel, image_request(PHOTO)).outputs
    call(channel, "RepositoryModelLoad", model_name="yolov8n")
    assert infer(channel, image_request(PHOTO, model="yolov8n")).outputs
    parameters = {"config": message("ModelRepositoryParameter")(string_param="{}")}
    wrong = lambda: call(channel, "RepositoryModelLoad", model_name="yolov8n", parameters=parameters)  # noqa: E731
    assert refused(wrong)[0] == "INVALID_ARGUMENT"


async def test_a_client_that_leaves_gives_its_reservation_up(service, grpc_port, client):
    def idle():
        return 'anychip_images_in_flight{model="yolov8n"} 0.0' in client.get("/metrics").text

    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        calls = [infer(channel, image_request(*[PHOTO] * 8, model="yolov8n")) for _ in range(8)]
        waiting = [asyncio.ensure_future(each) for each in calls]
        await until(lambda: not idle())
        for each in calls:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(idle)
    assert 'anychip_requests_total{code="CANCELLED",model="yolov8n"}' in client.get("/metrics").text


def test_the_descriptor_is_that_of_the_proto_file(tmp_path):
    generate_rpc.compile_to(tmp_path / "fresh.binpb")
    files = (tmp_path / "fresh.binpb", generate_rpc.DESCRIPTOR)
    fresh, kept = (descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()) for path in files)
    assert fresh == kept, "python deploy/generate_rpc.py makes it again"
