"""What one client can take of the gRPC service: others are answered all the while."""

from __future__ import annotations

import asyncio
import contextlib
import resource

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from anychip_grpc.messages import SERVICE
from app.access import keys
from tests.support import silent
from tests.support.grpc_client import image_request, infer
from tests.support.http2 import Http2Client
from tests.support.images import GREY
from tests.support.load import WAIT_S, until
from tests.support.null_service import post
from tests.support.service_process import free_port

SILENT = 5000
WATCHES, STREAMS = 2100, 250
_hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
MIB = 2**20
OUTPUT_MIB, READERS, BUDGET_MIB = 6, 40, 128


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
    null, budget = f"output_mb={OUTPUT_MIB}", str(BUDGET_MIB * MIB)
    with serve(null, "--grpc-port", str(port), "--max-buffered-bytes", budget) as service:
        assert infer(channel, image_request(GREY)).ByteSize() > 2 * OUTPUT_MIB * MIB
        process = psutil.Process(service.process.pid)
        before, readers = process.memory_info().rss, []
        try:
            for _ in range(READERS):
                readers.append(Http2Client(port, silent.ATTACKER, window=0))
                readers[-1].ask(f"/{SERVICE}/ModelInfer", image_request(GREY).SerializeToString())
            heads = [reader.begun(1) for reader in readers]
            assert process.memory_info().rss - before < BUDGET_MIB * MIB
            assert infer(channel, image_request(GREY)).outputs
            held = [reader for reader, (began, _) in zip(readers, heads, strict=True) if began]
            assert 0 < len(held) < READERS
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
