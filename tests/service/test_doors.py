"""One lock for every door: each socket that a service listens on, and each route, asked as strangers ask."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from pathlib import Path

import psutil
import pytest

from anychip_compat.deepstack import NEEDS
from app.access import keys
from app.access.rules import ROUTES
from tests.support.null_service import MODEL, serving
from tests.support.service_process import free_port

EVIL = "evil.example"
_LISTENS = "00010000"  # __SO_ACCEPTCON, as /proc/net/unix has it
ENDLESS = 64 << 20
"""So much is sent of what has no end: more than a service keeps of anything, or a socket takes."""


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Start a service with every possible door; yield it, its administrator's key, its doors, and the ports of gRPC."""
    folder = tmp_path_factory.mktemp("doors")
    key, rpc = keys.add(folder / "keys.txt", "ops", "admin"), free_port()
    options = ("--api-keys-file", str(folder / "keys.txt"), "--ingresses", "1", "--compat", "deepstack")
    with serving(folder, "", *options, "--grpc-port", str(rpc), "--reuse-port", str(free_port())) as service:
        yield service, key, doors(service.process.pid), {rpc, rpc + 2}


def doors(pid):
    """Return the ports that a process and its descendants listen on. Asserts that no other reachable sockets listen."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found, open_sockets = set(), set()
    for each in processes:
        with contextlib.suppress(psutil.Error):
            for one in each.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    assert one.laddr.ip == "127.0.0.1"
                    found.add(one.laddr.port)
            for file in Path(f"/proc/{each.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    open_sockets.update(re.findall(r"socket:\[(\d+)\]", str(file.readlink())))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == _LISTENS and words[6] in open_sockets:  # gRPC's core, whose address was taken away.
            assert not words[7].startswith("@")
            assert not Path(words[7]).exists(), "this one can be reached, and this test does not ask it"
    return found


def asked(port, how, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(how, path, body=b"", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def paths():
    """Each route, with names for what it takes, and what it needs by method."""
    for path, needs in {**ROUTES, **NEEDS}.items():
        yield re.sub(r"\{\w+(:path)?\}", lambda found: "a.js" if found[1] else MODEL, path), needs


def test_the_doors_are_those_that_are_documented(house):
    _, _, found, rpc = house
    answering = {port for port in found - rpc if asked(port, "GET", "/v2/health/live")[0] == 200}
    assert answering == found - rpc
    assert len(answering) == 3, "the port, the one that is shared, the administration's"
    assert rpc <= found


def test_under_another_name_nothing_is_answered_at_any_door(house):
    _, key, found, rpc = house
    for port in found - rpc:
        for path, needs in paths():
            for how in needs:
                status, body = asked(port, how, path, Host=EVIL, **{"X-Api-Key": key})
                assert status == 403, (port, how, path)
                assert how == "HEAD" or "the Host header names another service" in json.loads(body)["error"]


def test_no_web_page_administers_at_any_door_even_with_a_key(house):
    _, key, found, rpc = house
    for port in found - rpc:
        for path, needs in paths():
            if needs.get("POST") == "admin":
                assert asked(port, "POST", path, Origin=f"https://{EVIL}", **{"X-Api-Key": key})[0] == 403


HOST, HUGE = b" HTTP/1.1\r\nHost: localhost\r\n", b"Content-Length: 10000000000\r\n\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n"
HEADS = {
    "a body where none belongs": b"GET /ping" + HOST + HUGE,
    "a body in chunks where none belongs": b"GET /metrics" + HOST + CHUNKS,
    "a body without a key": b"POST /v1/models/m:predict" + HOST + HUGE,
    "a body in chunks without a key": b"POST /v1/models/m:predict" + HOST + CHUNKS,
    "a body for the administration": b"POST /v2/repository/models/m/load" + HOST + CHUNKS,
    "a header without an end": b"GET /ping" + HOST + b"X: ",
    "headers without an end": b"GET /ping" + HOST,
    "a request line without an end": b"GET /",
    "nothing that is HTTP": b"\x00\x01\x02",
}


@pytest.mark.parametrize("what", HEADS)
def test_what_has_no_end_is_ended_or_is_kept_nowhere_at_every_door(house, what):
    """What is refused is read and dropped for a while, so that its client hears why (tests/virtual)."""
    service, _, found, _ = house
    piece = b"x" * 65536 if what != "headers without an end" else b"a: b\r\n" * 10_000
    for port in found:
        before, sent = held(service), 0
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client, contextlib.suppress(ConnectionError):
            client.sendall(HEADS[what])
            while sent < ENDLESS:
                client.sendall(piece)
                sent += len(piece)
            assert held(service) - before < ENDLESS / 4, f"port {port} keeps {what}"
    assert service.process.poll() is None


def held(service):
    """Bytes of memory of the processes that answer: the server and its ingress."""
    processes = [psutil.Process(service.process.pid), *psutil.Process(service.process.pid).children(recursive=True)]
    answering = [each for each in processes if each.name() in ("anychip", "anychip-ingress", processes[0].name())]
    assert len(answering) >= 2
    return sum(each.memory_full_info().uss for each in answering)
