"""Clients that ask for much and read nothing: others are served all the while.

Thousands that say nothing are in test_tls.py and test_rpc_limits.py.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import socket

import httpx
import psutil

from tests.support.images import GREY
from tests.support.load import WAIT_S, until
from tests.support.null_service import metric

MIB = 2**20
OUTPUT_MIB = 16
READERS = 30
BUDGET_MIB = 128


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
