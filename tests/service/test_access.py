"""Who may ask a running service for what: every route and RPC, with every key, at both of its addresses."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import queue
import re

import grpc
import httpx
import pytest

from anychip_compat.deepstack import NEEDS
from anychip_grpc.answering import NEEDS as RPCS
from app.access import keys
from app.access.rules import ROUTES
from models import publishers
from models.contract.files import sha256_of
from tests.support.constants import CHANGES_PER_MINUTE
from tests.support.grpc_client import image_request, method
from tests.support.images import GREY, JPEG
from tests.support.load import WAIT_S
from tests.support.null_service import MODEL, PREDICT, serving
from tests.support.service_process import free_port
from tests.support.work import until

CALLERS = ("nobody", "wrong", "infer", "admin")
BINDS = ("public", "admin")
SAMPLE = publishers.sample_file("resnet50")
LIMITED = {
    "bytes=100": "100 bytes of requests",
    "pixels=1000": "1000 pixels",
    "images_per_s=0.01": "0.01 images a second",
    "priority=0": "a priority of 1",
}
"""Limits of keys, and what who has enough is told."""


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory):
    return tmp_path_factory.mktemp("guarded") / "keys.txt"


@pytest.fixture(scope="module")
def guarded(keys_file):
    """Start a service with keys; yield it, the keys, and the addresses of HTTP and the ports of gRPC by bind."""
    folder, file = keys_file.parent, keys_file
    made = {"wrong": "ak_wrong", "infer": keys.add(file, "cam", "infer"), "admin": keys.add(file, "ops", "admin")}
    for limits in LIMITED:
        made[limits] = keys.add(file, limits.partition("=")[0], "infer")
        file.write_text(f"{file.read_text().rstrip()} {limits}\n")
    port = free_port()
    ports = {"public": port, "admin": port + 2}
    options = ("--models", f"{MODEL}=resnet50:sample", "--api-keys-file", str(file), "--compat", "deepstack")
    with serving(folder, "", *options, "--grpc-port", str(port)) as service:
        yield service, made, {"public": service.url, "admin": service.admin_url}, ports


def expected(need, who, bind, *, open_code, refused, forbidden):
    """Return the expected status of a call; `open_code` stands for anything but a refusal."""
    if need == "open":
        return open_code
    if need == "admin" and bind == "public":
        return forbidden
    if who in ("nobody", "wrong"):
        return refused
    return forbidden if need == "admin" and who == "infer" else open_code


def headers_of(made, who):
    return {} if who == "nobody" else {"Authorization": f"Bearer {made[who]}"}


@pytest.mark.parametrize("bind", BINDS)
@pytest.mark.parametrize("who", CALLERS)
def test_every_route_answers_whom_it_should(guarded, who, bind):
    _, made, urls, _ = guarded
    found, wanted = {}, {}
    with httpx.Client(base_url=urls[bind], timeout=WAIT_S, headers=headers_of(made, who)) as client:
        for path, needs in {**ROUTES, **NEEDS}.items():
            for method, need in needs.items():
                with client.stream(method, re.sub(r"\{[\w:]+\}", "nobody", path)) as answer:
                    passed = answer.status_code not in (401, 403)
                    found[method, path] = "passed" if passed else answer.status_code
                need = "infer" if need == "metrics" else need  # noqa: PLW2901
                wanted[method, path] = expected(need, who, bind, open_code="passed", refused=401, forbidden=403)
    assert found == wanted


@pytest.mark.parametrize("bind", BINDS)
@pytest.mark.parametrize("who", CALLERS)
def test_every_rpc_answers_whom_it_should(guarded, who, bind):
    _, made, _, ports = guarded
    metadata = () if who == "nobody" else (("authorization", f"Bearer {made[who]}"),)
    found, wanted = {}, {}
    with grpc.insecure_channel(f"127.0.0.1:{ports[bind]}") as channel:
        for name, need in RPCS.items():
            if name.endswith("/Watch"):
                call = channel.unary_stream(name)(b"", timeout=WAIT_S, metadata=metadata)
            else:
                call = channel.stream_stream(name)(iter([b""]), timeout=WAIT_S, metadata=metadata)
            try:
                next(call, None)
                code = "passed"
            except grpc.RpcError as error:
                code = error.code().name
            call.cancel()
            found[name] = code if code in ("UNAUTHENTICATED", "PERMISSION_DENIED") else "passed"
            words = {"refused": "UNAUTHENTICATED", "forbidden": "PERMISSION_DENIED"}
            wanted[name] = expected(need, who, bind, open_code="passed", **words)
    assert found == wanted


def audit(service):
    lines = [line for line in service.log.read_text().splitlines() if '"anychip.audit"' in line]
    return [json.loads(line) for line in lines]


def test_every_call_of_the_administration_is_in_the_audit(guarded):
    service, made, urls, ports = guarded
    before = len(audit(service))
    path = f"/v2/repository/models/{MODEL}/load"
    for who in ("nobody", "infer", "admin"):
        httpx.post(urls["admin"] + path, headers=headers_of(made, who), timeout=WAIT_S)
    httpx.post(urls["public"] + path, headers=headers_of(made, "admin"), timeout=WAIT_S)
    httpx.post(urls["admin"] + "/v1/devices/x:release", headers=headers_of(made, "admin"), timeout=WAIT_S)
    with grpc.insecure_channel(f"127.0.0.1:{ports['admin']}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelUnload")
        with pytest.raises(grpc.RpcError, match="nobody"):
            call(b"\x12\x06nobody", timeout=WAIT_S, metadata=(("x-api-key", made["admin"]),))
        with pytest.raises(grpc.RpcError, match="API key"):
            call(b"\x12\x06nobody", timeout=WAIT_S)
    lines = audit(service)[before:]
    [loaded] = [each["weights_sha256"] for each in lines if "weights_sha256" in each]
    assert loaded == sha256_of(SAMPLE)
    found = [(each["message"], each["key"], each.get("model") or each["device"], each["outcome"]) for each in lines]
    assert found == [
        ("load", "", MODEL, "UNAUTHORIZED"),
        ("load", "cam", MODEL, "FORBIDDEN"),
        ("load", "ops", MODEL, "OK"),
        ("load", "", MODEL, "FORBIDDEN"),
        ("release", "ops", "x", "NOT_FOUND"),
        ("unload", "ops", "nobody", "MODEL_NOT_FOUND"),
        ("unload", "", "nobody", "UNAUTHORIZED"),
    ]
    assert not any(key in service.log.read_text() for key in (made["infer"], made["admin"]))
    assert '"message":"request"' not in service.log.read_text(), "without --log-requests"


@pytest.mark.parametrize("limits", LIMITED)
def test_a_key_has_the_limits_of_its_line(guarded, limits):
    service, made, *_ = guarded
    headers = {**JPEG, **headers_of(made, limits), "X-Priority": "1" if limits.startswith("priority") else "0"}
    url = service.url + PREDICT
    answers = [httpx.post(url, content=GREY, headers=headers, timeout=WAIT_S) for _ in range(2)]
    if limits.startswith("images"):
        assert answers.pop(0).status_code == 200, "the first image of all"
    for answer in answers:
        assert LIMITED[limits] in answer.json()["error"]
        assert (answer.status_code, "retry-after" in answer.headers) in ((429, True), (403, False))
    assert httpx.post(url, content=GREY, headers={**JPEG, **headers_of(made, "infer")}).status_code == 200


def test_a_priority_in_a_body_needs_the_key_that_one_in_a_header_needs(guarded):
    service, made, *_ = guarded
    image = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [base64.b64encode(GREY).decode()]}
    body = {"inputs": [image], "parameters": {"priority": 1}}
    url = f"{service.url}/v2/models/{MODEL}/infer"
    answer = httpx.post(url, json=body, headers=headers_of(made, "infer"), timeout=WAIT_S)
    assert (answer.status_code, answer.json()["error"]) == (
        403,
        "a priority of 1 is more than the 0 that this key may have",
    )


def test_only_who_administers_sees_who_asks(guarded):
    service, made, *_ = guarded
    seen, listed = (
        httpx.get(service.url + "/v1/stats", headers=headers_of(made, who), timeout=WAIT_S).json()["clients"]
        for who in ("infer", "admin")
    )
    assert seen == []
    assert "key:ops" in {each["client"] for each in listed}


def test_a_key_that_is_taken_back_stops_on_connections_that_are_open(guarded, keys_file):
    service, *_, ports = guarded
    others = keys_file.read_text()
    sent = {"Authorization": f"Bearer {keys.add(keys_file, 'short', 'infer')}"}
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=WAIT_S)

    def status():
        connection.request("POST", PREDICT, GREY, {**JPEG, **sent})
        answer = connection.getresponse()
        answer.read()
        return answer.status

    until(lambda: status() == 200)  # The file is looked at once a second.
    opened, messages = connection.sock, queue.Queue()
    messages.put(image_request(GREY))
    metadata = (("authorization", sent["Authorization"]),)
    with (
        contextlib.closing(connection),
        grpc.insecure_channel(f"127.0.0.1:{ports['public']}") as channel,
        httpx.stream("GET", service.url + "/v1/stats/stream", headers=sent, timeout=WAIT_S) as stats,
    ):
        lines = stats.iter_lines()
        assert "event: stats" in lines
        stream = method(channel, "ModelStreamInfer")(iter(messages.get, None), timeout=WAIT_S, metadata=metadata)
        assert not next(stream).error_message
        keys_file.write_text(others)
        until(lambda: status() == 401)
        assert connection.sock is opened
        messages.put(image_request(GREY))
        with pytest.raises(grpc.RpcError) as refused:
            next(stream)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        messages.put(None)
        list(lines)  # What was sent before; then the stream ends.


async def test_loads_never_queue_up_and_are_not_too_frequent(tmp_path):
    path = f"/v2/repository/models/{MODEL}/load"
    with serving(tmp_path, "import_ms=500", constants={CHANGES_PER_MINUTE: 1}) as service:
        async with httpx.AsyncClient(base_url=service.admin_url, timeout=WAIT_S) as client:
            answers = await asyncio.gather(*(client.post(path) for _ in range(6)))
            codes = [answer.status_code for answer in answers]
            assert sorted(codes) == [200, *[429] * 5]
            assert all("another" in each.json()["error"] for each in answers if each.status_code == 429)
            while (too_soon := await client.post(path)).status_code == 200:
                pass  # The one before took more than a minute.
            assert too_soon.status_code == 429
            assert 0 < int(too_soon.headers["retry-after"]) <= 60
        assert httpx.post(service.url + path, timeout=WAIT_S).status_code == 403


def test_administration_and_the_page_can_be_turned_off(tmp_path):
    with serving(tmp_path, "", "--admin", "off", "--playground", "false") as service, service.client() as client:
        assert client.post(f"/v2/repository/models/{MODEL}/unload").status_code == 403
        assert "administration at" not in service.log.read_text()
        for path in ("/", "/playground/main.js"):
            assert client.get(path, headers={"Accept": "text/html"}).status_code == 404
