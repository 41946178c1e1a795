"""Clients that say nothing, ask for much or read nothing, over HTTP, TLS and gRPC: others are served all the while."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import selectors
import shutil
import socket
import ssl
import struct
from collections.abc import Iterator

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from anychip_grpc.messages import SERVICE
from app.access import keys
from app.access.tls import Tls
from app.config import Settings
from tests.support import silent, work
from tests.support.certificates import authority, issued
from tests.support.grpc_client import call, image_request, infer
from tests.support.images import GREY, JPEG
from tests.support.load import WAIT_S, until
from tests.support.null_service import PREDICT, metric, post, serving
from tests.support.service_process import free_port

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW = 4


class Http2Client:
    """Connection from an address. `window`: how much of each answer it takes; it never asks for more."""

    def __init__(self, port: int, source: str = "127.0.0.1", window: int = 65535) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S, (source, 0))
        settings = struct.pack("!HI", _INITIAL_WINDOW, window)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings))
        while next(self.frames())[0] != _SETTINGS:
            pass
        self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        self._stream = -1

    def ask(self, path: str, message: bytes) -> None:
        self._stream += 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        data = b"\0" + struct.pack("!I", len(message)) + message
        self.socket.sendall(
            _frame(_HEADERS, _END_HEADERS, self._stream, block) + _frame(_DATA, _END_STREAM, self._stream, data)
        )

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield kind, flags, stream and payload of each frame, until the server closes the connection."""
        while head := self._exactly(9):
            size, kind, flags, stream = int.from_bytes(head[:3], "big"), head[3], head[4], head[5:]
            yield kind, flags, int.from_bytes(stream, "big"), self._exactly(size)

    def begun(self, count: int) -> tuple[int, int]:
        """Wait for the heads of so many answers; return how many have begun, and how many were only refused."""
        begun = refused = 0
        while begun + refused < count:
            kind, flags, _, _ = next(self.frames())
            if kind == _HEADERS:
                refused += flags & _END_STREAM
                begun += not flags & _END_STREAM
        return begun, refused

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size and (data := self.socket.recv(size - len(parts))):
            parts += data
        return parts if len(parts) == size else b""


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


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


SILENT = 5000
WATCHES, STREAMS = 2100, 250
_hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
RPC_OUTPUT_MIB, RPC_READERS = 6, 40


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def channel(port):
    unlimited = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
        yield channel


def check(channel):
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status


def keyed(tmp_path):
    """Options of a service with keys, and the metadata of a client that has one."""
    file = tmp_path / "keys.txt"
    return ("--api-keys-file", str(file)), (("x-api-key", keys.add(file, "cam", "infer")),)


@pytest.mark.skipif(resource.RLIM_INFINITY != _hard < SILENT + 1000, reason=f"{SILENT} descriptors are needed")
def test_silent_connections_are_counted_and_end(serve, tmp_path, port, channel):
    options, metadata = keyed(tmp_path)
    with serve("delay_ms=1", "--grpc-port", str(port), *options) as service:
        with silent.connections(port, SILENT) as begun:
            for _ in range(20):
                assert infer(channel, image_request(GREY), metadata=metadata).outputs
                assert check(channel) == health_pb2.HealthCheckResponse.SERVING
                with grpc.insecure_channel(f"127.0.0.1:{port}") as another:
                    assert check(another) == health_pb2.HealthCheckResponse.SERVING
            assert len(psutil.Process(service.process.pid).net_connections("tcp")) < 1600
            with silent.client_elsewhere(service.url) as client:
                assert client.get("/v2/health/live").status_code == 200
            silent.until_ended(begun, SILENT, WAIT_S)  # Within the ten seconds of a handshake.
        assert f"connections from {silent.ATTACKER} are refused" in service.log.read_text()


def test_watches_of_one_client_block_nobody(serve, tmp_path, port, channel):
    options, metadata = keyed(tmp_path)
    with serve("delay_ms=1", "--grpc-port", str(port), *options), contextlib.ExitStack() as stack:
        begun = 0
        for first in range(0, WATCHES, STREAMS):
            client = Http2Client(port, silent.ATTACKER)
            stack.callback(client.close)
            count = min(STREAMS, WATCHES - first)
            for _ in range(count):
                client.ask("/grpc.health.v1.Health/Watch", b"")
            begun += client.begun(count)[0]
            assert infer(channel, image_request(GREY), metadata=metadata).outputs
            assert check(channel) == health_pb2.HealthCheckResponse.SERVING
        assert 16 <= begun <= 64
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING


def test_answers_for_which_a_client_has_no_room_stay_within_the_budget_and_end(serve, port, channel):
    null, budget = f"output_mb={RPC_OUTPUT_MIB}", str(BUDGET_MIB * MIB)
    with serve(null, "--grpc-port", str(port), "--max-buffered-bytes", budget) as service:
        assert infer(channel, image_request(GREY)).ByteSize() > 2 * RPC_OUTPUT_MIB * MIB
        process = psutil.Process(service.process.pid)
        before, readers = process.memory_info().rss, []
        try:
            for _ in range(RPC_READERS):
                readers.append(Http2Client(port, silent.ATTACKER, window=0))
                readers[-1].ask(f"/{SERVICE}/ModelInfer", image_request(GREY).SerializeToString())
            heads = [reader.begun(1) for reader in readers]
            assert process.memory_info().rss - before < BUDGET_MIB * MIB
            assert infer(channel, image_request(GREY)).outputs
            held = [reader for reader, (began, _) in zip(readers, heads, strict=True) if began]
            assert 0 < len(held) < RPC_READERS
            for reader in held:  # Until the service has closed it.
                with contextlib.suppress(ConnectionError):
                    assert not [frame for frame in reader.frames() if frame[0] == 0 and frame[3]]
        finally:
            for reader in readers:
                reader.close()
        asyncio.run(until(lambda: process.memory_info().rss - before < 16 * MIB))


def test_a_client_of_both_transports_has_one_share(serve, port, channel):
    with serve("delay_ms=1", "--grpc-port", str(port), "--client-limits", "images_per_s=0.001") as service:
        assert post(service) == (200, "OK")
        with pytest.raises(grpc.RpcError) as refused:
            infer(channel, image_request(GREY))
        assert dict(refused.value.trailing_metadata())["code"] == "QUEUE_FULL"


openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")


def subject(port, context):
    """Of the certificate that the service shows."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return dict(pair for part in secure.getpeercert()["subject"] for pair in part)["commonName"]


@openssl
def test_clients_with_certificates_are_served_and_renewed_ones_are_shown(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    ours, strangers = authority(made, "authority"), authority(made, "strangers")
    first, second = issued(made, "first", ours), issued(made, "second", ours)
    client, stranger = issued(made, "client", ours), issued(made, "stranger", strangers)
    key, certificate = tmp_path / "server.key", tmp_path / "server.pem"
    for source, target in zip(first, (key, certificate), strict=True):
        shutil.copy(source, target)
    port = free_port()
    options = ("--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", ours[1], "--grpc-port", port)
    with serving(tmp_path, "", *map(str, options), "--ingresses", "1") as service:
        assert service.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(ours[1]))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{service.url}/v2/health/live", verify=trusting, timeout=WAIT_S)
        pretending = ssl.create_default_context(cafile=str(ours[1]))
        pretending.load_cert_chain(stranger[1], stranger[0])
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{service.url}/v2/health/live", verify=pretending, timeout=WAIT_S)
        trusting.load_cert_chain(client[1], client[0])
        answer = httpx.post(service.url + PREDICT, content=GREY, headers=JPEG, verify=trusting, timeout=WAIT_S)
        assert answer.status_code == 200
        assert httpx.get(f"{service.admin_url}/v2/health/live", timeout=WAIT_S).status_code == 200

        def channel(with_certificate):
            pair = (client[0].read_bytes(), client[1].read_bytes()) if with_certificate else (None, None)
            return grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(ours[1].read_bytes(), *pair))

        with channel(True) as known:
            assert call(known, "ServerLive").live
        with channel(False) as unknown, pytest.raises(grpc.RpcError):
            call(unknown, "ServerLive", timeout=10)

        http_port = int(service.url.rpartition(":")[2])
        assert subject(http_port, trusting) == "first"
        shutil.copy(second[1], certificate)  # Its key is not there yet: the old pair stays in use.
        shutil.copy(second[0], key)
        work.until(lambda: subject(http_port, trusting) == "second")
        with channel(True) as renewed:
            assert call(renewed, "ServerLive").live


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tls_cert": "a.pem"}, "need each other"),
        ({"tls_client_ca": "a.pem"}, "needs --tls-cert"),
        ({"tls_cert": "a.pem", "tls_key": "a.key"}, "TLS cannot be had"),
    ],
)
def test_half_of_a_setting_is_refused(given, reason):
    with pytest.raises(OSError, match=reason):
        Tls.of(Settings(**given))


@openssl
def test_silent_connections_to_tls_stop_nobody_else_and_end_with_the_time_for_a_handshake(tmp_path):
    key, certificate = authority(tmp_path, "localhost")
    with serving(tmp_path, "delay_ms=1", "--tls-cert", str(certificate), "--tls-key", str(key)) as service:
        port, trusting = httpx.URL(service.url).port, ssl.create_default_context(cafile=certificate)
        trusting.check_hostname = False
        with (
            silent.connections(port, SILENT) as begun,
            silent.client_elsewhere(service.url, verify=trusting) as client,
        ):
            for _ in range(20):
                assert client.post(PREDICT, content=GREY, headers=JPEG).status_code == 200
                assert client.get("/v2/health/live").status_code == 200
            assert httpx.get(f"{service.admin_url}/v2/health/live", timeout=WAIT_S).status_code == 200
            assert not any(silent.until_ended(begun, SILENT, WAIT_S))
            assert client.get("/v2/health/live").status_code == 200
