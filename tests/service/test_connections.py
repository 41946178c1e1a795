"""Clients that take connections and say nothing, or ask for much and read nothing: others are served all the while."""

from __future__ import annotations

import asyncio
import json
import resource
import selectors
import socket

import httpx
import psutil
import pytest

from app.access import keys
from tests.support import silent
from tests.support.images import GREY, JPEG
from tests.support.load import WAIT_S, until
from tests.support.null_service import PREDICT, metric

SILENT = 5000
_hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
MIB = 2**20
OUTPUT_MIB = 16
READERS = 30
BUDGET_MIB = 128


@pytest.mark.skipif(resource.RLIM_INFINITY != _hard < SILENT + 1000, reason=f"{SILENT} descriptors are needed")
def test_silent_connections_of_one_address_stop_nobody_else(serve, tmp_path):
    file = tmp_path / "keys.txt"
    headers = {**JPEG, "X-Api-Key": keys.add(file, "cam", "infer")}
    with serve("delay_ms=1", "--api-keys-file", str(file)) as service:
        port = httpx.URL(service.url).port
        with silent.connections(port, SILENT) as begun, silent.client_elsewhere(service.url) as client:
            for _ in range(50):
                assert client.post(PREDICT, content=GREY, headers=headers).status_code == 200
                assert client.get("/v2/health/live").status_code == 200
            assert httpx.get(f"{service.admin_url}/v2/health/live", timeout=WAIT_S).status_code == 200
            refused = silent.until_ended(begun, SILENT - 1440, WAIT_S)
            assert sum(said.startswith(b"HTTP/1.1 429") for said in refused) > SILENT * 0.7
        assert f"connections from {silent.ATTACKER} are refused" in service.log.read_text()


def infer_request():
    """Build a small request with an answer of two times OUTPUT_MIB."""
    head = {"name": "image", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(GREY) + 4}}
    document = json.dumps({"inputs": [head], "parameters": {"binary_data_output": True}}).encode()
    body = document + len(GREY).to_bytes(4, "little") + GREY
    lines = (
        "POST /v2/models/resnet18/infer HTTP/1.1",
        "host: localhost",
        f"content-length: {len(body)}",
        f"inference-header-content-length: {len(document)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answered(readers):
    """Wait until something has come on each; how often which status did."""
    found = {}
    with selectors.DefaultSelector() as selector:
        for each in readers:
            selector.register(each, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                selector.unregister(key.fileobj)
                status = int(key.fileobj.recv(12).split()[1])
                found[status] = found.get(status, 0) + 1
    return found


def established(connection):
    """Whether the server still has its end of it."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1


def test_answers_that_nobody_reads_stay_within_the_budget_and_their_connections_end(serve):
    with serve(f"output_mb={OUTPUT_MIB}", "--max-buffered-bytes", str(BUDGET_MIB * MIB)) as service:
        address, asked = ("127.0.0.1", httpx.URL(service.url).port), infer_request()

        def whole():
            with socket.create_connection(address, timeout=WAIT_S) as connection:
                connection.sendall(asked.replace(b"host:", b"connection: close\r\nhost:"))
                received = 0
                while data := connection.recv(1 << 20):
                    received += len(data)
            return received

        assert whole() > 2 * OUTPUT_MIB * MIB
        process = psutil.Process(service.process.pid)
        before = process.memory_info().rss
        readers = []
        try:
            for _ in range(READERS):
                readers.append(socket.create_connection(address, timeout=WAIT_S))
                readers[-1].sendall(asked)
            found = answered(readers)
            assert found.keys() == {200, 429}
            # What answers were made of comes on top for a moment, and goes while they are held.
            assert process.memory_info().rss - before < (2 * BUDGET_MIB + 64) * MIB
            asyncio.run(until(lambda: process.memory_info().rss - before < (BUDGET_MIB + 16) * MIB))
            assert sum(map(established, readers)) == READERS
            asyncio.run(until(lambda: sum(map(established, readers)) == READERS - found[200]))
            asyncio.run(until(lambda: process.memory_info().rss - before < 16 * MIB))
        finally:
            for each in readers:
                each.close()
        assert whole() > 2 * OUTPUT_MIB * MIB
        assert metric(service, "anychip_images_in_flight") == 0
