"""The port while models are read and loaded: it is open, and says how far the start is."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.support.service_process import free_port

WAIT_S = 60


class Publisher(BaseHTTPRequestHandler):
    """Whose files come once `go` is set, and are not there then."""

    go = threading.Event()
    asked = threading.Event()

    def do_GET(self) -> None:
        self.asked.set()
        self.go.wait(WAIT_S)
        with contextlib.suppress(ConnectionError):
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[str]:
    Publisher.go.clear()
    Publisher.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Publisher)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Publisher.go.set()
    server.shutdown()
    thread.join()
    server.server_close()


@contextlib.contextmanager
def starting(folder: Path, port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--cache-dir", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(port: int, words: str) -> httpx.Response:
    """The first answer about readiness with these words."""
    pause = threading.Event()
    for _ in range(WAIT_S * 20):
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:{port}/v2/health/ready")
            if words in answer.text:
                return answer
        pause.wait(0.05)
    raise AssertionError(f"it never said {words!r}")


def test_the_port_is_open_while_models_are_read_and_says_which_are(tmp_path: Path, mirror: str) -> None:
    port = free_port()
    models = ("--models", "quick=resnet50:sample,resnet18", "--weights-mirror", mirror)
    with starting(tmp_path, port, *models) as process:
        assert Publisher.asked.wait(WAIT_S)
        ready = said(port, "1 of 2 models are read (quick); not yet: resnet18")
        assert (ready.status_code, ready.json()["code"], ready.headers["retry-after"]) == (503, "NOT_READY", "1")
        assert ready.json()["request_id"] == ready.headers["x-request-id"]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            alive = client.get("/v2/health/live")
            assert (alive.status_code, alive.json()) == (200, {"live": True})
            predict = client.post("/v1/models/quick:predict", content=b"x" * 1_000_000)
            assert (predict.status_code, predict.json()["code"]) == (503, "NOT_READY")
            assert client.head("/v2/health/ready").status_code == 503
        Publisher.go.set()
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "quick is read" in errors
    assert errors.splitlines()[-1].startswith("anychip: ")


def test_a_service_that_reads_models_ends_at_once_when_told_to(tmp_path: Path, mirror: str) -> None:
    with starting(tmp_path, free_port(), "--models", "resnet18", "--weights-mirror", mirror) as process:
        assert Publisher.asked.wait(WAIT_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM


def test_models_that_are_loaded_are_named_before_all_are(tmp_path: Path) -> None:
    port = free_port()
    null = ("--device", "null", "--null", "load_ms=1500", "--weights", "random")
    with starting(tmp_path, port, "--models", "first=resnet18,second=resnet18", *null) as process:
        loading = said(port, "1 of 2 models are loaded (first); no worker is ready for first, second")
        assert loading.status_code == 503
        said(port, '"ready":true')
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "served by null:0" in errors
    assert re.search(r"second: null fp32 on null:0 after [1-9][.\d]* s", errors)
