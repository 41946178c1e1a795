"""The port while models are read and loaded: it is open, and says how far the start is."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import grpc
import httpx
import pytest
import safetensors.torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torchvision import models as torchvision_models

from app.access.rules import LIVE, READY
from tests.support.grpc_client import call
from tests.support.hub import Hub, serving
from tests.support.service_process import free_port

WAIT_S = 60
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Held(Hub):
    """A Hub, or a mirror without files, that answers once `go` is set."""

    asked_once: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked_once.set()
        self.go.wait(WAIT_S)
        with contextlib.suppress(ConnectionError):
            super().answer(request)


@pytest.fixture
def mirror() -> Iterator[Held]:
    with serving(Held()) as held:
        yield held
        held.go.set()


@contextlib.contextmanager
def starting(folder: Path, port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--cache-dir", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


ask = functools.partial(call, timeout=WAIT_S)


def said(port: int, words: str) -> httpx.Response:
    """Wait for the first readiness answer with these words."""
    pause = threading.Event()
    for _ in range(WAIT_S * 20):
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:{port}/v2/health/ready")
            if words in answer.text:
                return answer
        pause.wait(0.05)
    raise AssertionError(f"it never said {words!r}")


def test_the_ports_are_open_while_models_are_read_and_say_which_are(tmp_path: Path, mirror: Held) -> None:
    port, admin_port, grpc_port = free_port(), free_port(), free_port()
    models = ("--models", "quick=resnet50:sample,resnet18", "--weights-mirror", mirror.url)
    ports = ("--admin-port", str(admin_port), "--grpc-port", str(grpc_port))
    with starting(tmp_path, port, *models, *ports) as process:
        assert mirror.asked_once.wait(WAIT_S)
        ready = said(port, "1 of 2 models are read (quick); not yet: resnet18")
        assert (ready.status_code, ready.json()["code"], ready.headers["retry-after"]) == (503, "NOT_READY", "1")
        assert ready.json()["request_id"] == ready.headers["x-request-id"]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            for path in LIVE:
                alive = client.get(path)
                assert (alive.status_code, alive.json()) == (200, {"live": True}), path
            assert {client.get(path).status_code for path in READY} == {503}
            predict = client.post("/v1/models/quick:predict", content=b"x" * 1_000_000)
            assert (predict.status_code, predict.json()["code"]) == (503, "NOT_READY")
            assert client.head("/v2/health/ready").status_code == 503
        administration = said(admin_port, "1 of 2 models are read (quick)")
        assert administration.json()["code"] == "NOT_READY"
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            assert ask(channel, "ServerLive").live
            assert not ask(channel, "ServerReady").ready
            assert not ask(channel, "ModelReady").ready
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status == NOT_SERVING
            with pytest.raises(grpc.RpcError) as refused:
                ask(channel, "ModelInfer")
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "1 of 2 models are read (quick); not yet: resnet18" in refused.value.details()
            assert ("code", "NOT_READY") in refused.value.trailing_metadata()
        mirror.go.set()
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "quick is read" in errors
    assert errors.splitlines()[-1].startswith("anychip: ")


def test_a_watch_that_began_before_there_was_a_service_ends_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpc_port = free_port()
    options = ("--models", "dogs=resnet18:hf://org/dogs", "--device", "null", "--weights", "random")
    weights = safetensors.torch.save(torchvision_models.resnet18(weights=None, num_classes=2).state_dict())
    held = Held(files={"model.safetensors": weights})
    with serving(held) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        with starting(tmp_path, free_port(), *options, "--grpc-port", str(grpc_port)) as process:
            with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                health = health_pb2_grpc.HealthStub(channel)
                statuses = []
                for _ in range(2):  # As gRPC's own channels do.
                    watch = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=WAIT_S)
                    for answer in watch:
                        statuses.append(answer.status)
                        held.go.set()
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            watch.cancel()
                            break
                assert statuses[0] == NOT_SERVING
                assert health_pb2.HealthCheckResponse.SERVING in statuses
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
