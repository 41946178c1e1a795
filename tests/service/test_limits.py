"""What a client may cost: each of these requests is bounded, and the service answers others all the while.

The device is null; the faults are real: clients that lie about sizes, stop in the middle, or send what is dear to read.
During each test somebody asks the service whether it is alive, and its loop has a guard (tests/support/liveness.py).
"""

from __future__ import annotations

import asyncio
import base64
import json
import random

import httpx
import pytest

from tests.support.constants import LEAST_UPLOAD_BYTES_PER_S
from tests.support.images import GREY, JPEG
from tests.support.liveness import answering
from tests.support.null_service import AS_REAL_ONES, DEVICES, serving

PREDICT = "/v1/models/resnet18:predict"
INFER = "/v2/models/resnet18/infer"
WAIT_S = 240


@pytest.fixture(scope="module")
def service(tmp_path_factory, port):
    # Outputs as the model has them: with 2 MB each, 64 images at once would have answers of 128 MB.
    null = DEVICES[AS_REAL_ONES].replace("output_mb=2,", "")
    options, constants = ("--grpc-port", str(port)), {LEAST_UPLOAD_BYTES_PER_S: 100_000}
    with serving(tmp_path_factory.mktemp("limits"), null, *options, constants=constants, guarded=True) as found:
        httpx.post(found.url + PREDICT, content=GREY, headers=JPEG, timeout=WAIT_S)
        yield found


@pytest.fixture(autouse=True)
def answered_throughout(service):
    """Every test is looked at."""
    with answering(service):
        yield


def noise(size):
    return random.Random(0).randbytes(size)


async def gathered(service, path, bodies, **headers):
    async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:
        return await asyncio.gather(*(client.post(path, content=body, headers=headers) for body in bodies))


def instances(content, count=1):
    return json.dumps({"instances": [{"b64": base64.b64encode(content).decode()}] * count}).encode()


DEAR = {
    "base64 of 19 MB": (PREDICT, instances(noise(14_000_000)), 422),
    "many small instances": (PREDICT, instances(noise(4), 500_000), 400),
    "lists in lists": (PREDICT, b'{"instances": [' + b"[],[[]]," * 2_000_000 + b"1]}", 400),
    "numbers": (
        INFER,
        b'{"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [64, 224, 224, 3], "data": ['
        + b"7," * 9_633_791
        + b"7]}]}",
        200,
    ),
    "one long string among many": (
        INFER,
        b'{"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [400001],'
        + b' "data": ["'
        + b"x" * 1_000_000
        + b'"'
        + b',"a"' * 400_000
        + b"]}]}",
        400,
    ),
    "many parts": (PREDICT, b"--b\r\n" + b"\r\n--b\r\n" * 2_000_000, 400),
    "a part of carriage returns": (
        PREDICT,
        b'--b\r\ncontent-disposition: form-data; name="f"; filename="f"\r\n\r\n'
        + b"\r" * 19_000_000
        + b"\r\n--b--\r\n",
        422,
    ),
    "two parts, one of line ends": (
        PREDICT,
        b'--b\r\ncontent-disposition: form-data; name="f"; filename="f"\r\n\r\nx\r\n'
        + b'--b\r\ncontent-disposition: form-data; name="f"; filename="f"\r\n\r\n'
        + b"\r\n" * 9_000_000
        + b"\r\n--b--\r\n",
        422,
    ),
}
"""Of each what it is sent to, and the status of its answer."""


@pytest.mark.parametrize("what", DEAR)
async def test_bodies_that_are_dear_to_read(service, what):
    path, body, status = DEAR[what]
    kind = "multipart/form-data; boundary=b" if body.startswith(b"--b") else "application/json"
    headers = {"Content-Type": kind, "X-Timeout-Ms": "600000"}  # What it is, and not how long that took.
    for answer in await gathered(service, path, [body] * 3, **headers):
        assert answer.status_code == status, answer.text[:200]


async def test_binary_tensors_of_nothing(service):
    head = {"name": "image", "datatype": "BYTES", "shape": [4_000_000], "parameters": {"binary_data_size": 16_000_000}}
    document = json.dumps({"inputs": [head]}).encode()
    pixels = {"name": "pixels", "datatype": "UINT8", "shape": [5_000_000, 1, 1, 3], "parameters": {"resize": True}}
    many = json.dumps({"inputs": [pixels]}).encode()
    for each, rest in ((document, bytes(16_000_000)), (many, bytes(15_000_000))):
        [answer] = await gathered(service, INFER, [each + rest], **{"Inference-Header-Content-Length": str(len(each))})
        assert answer.status_code == 400


@pytest.fixture
def channel(service, port):
    grpc = pytest.importorskip("grpc")
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as found:
        yield found


def rpc(channel, method, data):
    """Begin a call with these bytes at once; return its future."""
    return channel.unary_unary(f"/inference.GRPCInferenceService/{method}").future(data, timeout=WAIT_S)


def infer_message(*fields, **known):
    from anychip_grpc.messages import message

    return message("ModelInferRequest")(model_name="resnet18", **known).SerializeToString() + b"".join(fields)


def test_messages_that_are_dear_to_read(service, channel):
    from anychip_grpc.messages import message

    numbers = message("ModelInferRequest")(model_name="resnet18")
    numbers.inputs.add(name="pixels", datatype="UINT8", shape=[64, 224, 224, 3])
    numbers.inputs[0].contents.uint_contents.extend([7] * (64 * 224 * 224 * 3))
    empty = message("ModelInferRequest")(model_name="resnet18")
    empty.inputs.add(name="image", datatype="BYTES", shape=[4_000_000])
    empty.inputs[0].contents.bytes_contents.extend([b""] * 4_000_000)
    dear = {
        "inputs": infer_message(b"\x2a\x00" * 400_000),
        "raw contents": infer_message(b"\x3a\x00" * 400_000),
        "numbers": numbers.SerializeToString(),
        "elements": empty.SerializeToString(),
        "no message": b"\xff" * 1_000_000,
        "a message of another kind": b"\x0a\xff\xff\xff\xff\x0f",
    }
    for what, data in dear.items():
        code = rpc(channel, "ModelInfer", data).code().name
        assert code == ("OK" if what == "numbers" else "INVALID_ARGUMENT"), what
    for method in ("ServerReady", "ModelReady", "ModelMetadata", "RepositoryIndex"):
        failed = rpc(channel, method, b"\xff\xff").exception()
        assert failed.code().name == "INVALID_ARGUMENT"
        assert "Error" not in failed.details()


def test_a_call_without_end_has_the_longest_deadline(service, channel):
    """Thirty years are cut to what is configured."""
    from anychip_grpc.messages import message

    request = message("ModelInferRequest")(model_name="resnet18")
    request.inputs.add(name="image", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(GREY).to_bytes(4, "little") + GREY)
    assert channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(request.SerializeToString(), timeout=1e9)
