"""Servers to compare, each in a child process on a free port of the loopback interface.

Owns: their start, the CPU time they used, their end (with everything they started), and the requests they understand.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from anychip_tools.benchmark.load import request_bytes
from models.sample import IMAGES

_ROOT = Path(__file__).resolve().parent.parent
_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 60.0


@dataclass
class CpuTime:
    """Seconds of CPU, user and system: of the process that listens, and of all it has started."""

    server_s: float
    workers_s: float


@dataclass
class Server:
    """Running server."""

    port: int
    process: psutil.Process

    def cpu_time(self) -> CpuTime:
        """Return the CPU time used so far."""
        return CpuTime(cpu_s(self.process), sum(cpu_s(child) for child in self.process.children(recursive=True)))

    def cpu_by_role(self) -> dict[str, float]:
        """Return the seconds used so far by the started process (`server`), and by its children: `decoder`,
        `worker`, others by name.
        """
        used = {"server": cpu_s(self.process)}
        for child in self.process.children(recursive=True):
            role = _role(child)
            used[role] = used.get(role, 0.0) + cpu_s(child)
        return used


_ROLES = {
    "anychip-worker": "worker",
    "fork-workers": "worker",
    "anychip-decoder": "decoder",
    "fork-decoders": "decoder",
}
"""Role of each process of the service, by its process name."""


def _role(process: psutil.Process) -> str:
    try:
        name = str(process.name())
    except psutil.Error:
        return "gone"
    return _ROLES.get(name, name)


def cpu_s(process: psutil.Process) -> float:
    """Return the seconds a process has used so far, user and system; 0 once it is gone."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


@contextlib.contextmanager
def service(
    models: str, *options: str, module: str = "app", environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run `anychip serve` with these options. `module`: the module to run for it; `environment`: added variables."""
    command = [sys.executable, "-m", module, "serve", "--models", models, "--port", "0", *options]
    with _process(command, _STOP_LIMIT_S, environment, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(_START_LIMIT_S, process.kill)  # Ends the read below, too.
        limit.start()
        line = process.stdout.readline() if process.stdout else ""
        limit.cancel()
        found = re.search(r":(\d+)\s*$", line)
        if not found:
            raise RuntimeError(f"the service did not start: {' '.join(command)} printed {line!r}")
        yield Server(int(found.group(1)), psutil.Process(process.pid))


def service_request(model: str, image: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Build a request to `service` with a JPEG as its raw body."""
    return request_bytes(f"/v1/models/{model}:predict", image, "image/jpeg", headers)


def pixels_request(model: str, shape: tuple[int, ...]) -> bytes:
    """Build a request of the Open Inference Protocol: pixels of this shape as a binary tensor."""
    pixels = np.random.default_rng(0).integers(0, 256, (1, *shape), dtype=np.uint8).tobytes()
    parameters = {"binary_data_size": len(pixels)}
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [1, *shape], "parameters": parameters}
    return _tensor_request(model, tensor, pixels)


def file_request(model: str, image: bytes) -> bytes:
    """Build a request of the Open Inference Protocol for Triton: a JPEG's bytes as a binary tensor `image`."""
    parameters = {"binary_data_size": len(image)}
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, len(image)], "parameters": parameters}
    return _tensor_request(model, tensor, image)


def _tensor_request(model: str, tensor: dict[str, Any], data: bytes) -> bytes:
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "predictions"}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return request_bytes(f"/v2/models/{model}/infer", head + data, "application/octet-stream", headers)


@contextlib.contextmanager
def naive(model: str, weights: str) -> Iterator[Server]:
    """Run the handler that most people write."""
    with _uvicorn("benchmarks.naive_server", model, weights) as server:
        yield server


def form_request(field: str, image: bytes) -> bytes:
    """Build a request with a JPEG as a form's file, for `naive`, LitServe and BentoML."""
    multipart = (
        b'--b\r\nContent-Disposition: form-data; name="%s"; filename="a.jpg"\r\n' % field.encode()
        + b"Content-Type: image/jpeg\r\n\r\n"
        + image
        + b"\r\n--b--\r\n"
    )
    return request_bytes("/predict", multipart, "multipart/form-data; boundary=b")


@contextlib.contextmanager
def plain() -> Iterator[Server]:
    """Run the least a FastAPI handler can do."""
    with _uvicorn("benchmarks.plain_server") as server:
        yield server


def plain_request(image: bytes) -> bytes:
    """Build a request to `plain` with a JPEG as its raw body."""
    return request_bytes("/predict", image, "image/jpeg")


def sample_image() -> bytes:
    """Read the JPEG that is sent by default."""
    return sorted(IMAGES.glob("*.jpg"))[0].read_bytes()


def jpeg_request(path: str, image: bytes) -> bytes:
    """Build a request to a path with a JPEG as its raw body."""
    return request_bytes(path, image, "image/jpeg")


@contextlib.contextmanager
def other(command: list[str], path: str = "/") -> Iterator[Server]:
    """Run a server that takes its port behind `command` and answers a GET of `path`, with our packages importable."""
    port = free_port()
    # Such a server starts its own processes with the Python that runs it.
    environment = {"PYTHONPATH": os.pathsep.join(search_path())}
    with _process([*command, str(port)], 10.0, environment) as process:
        _wait_until_it_answers(process, port, path)
        yield Server(port, psutil.Process(process.pid))


def search_path() -> list[str]:
    """Return the folders in which another interpreter finds our packages and those installed here."""
    installed = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    return [str(_ROOT), str(_ROOT / "plugins" / "tools"), *installed]


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def _uvicorn(module: str, *arguments: str) -> Iterator[Server]:
    port = free_port()
    # A short limit: these servers may have a queue of abandoned requests.
    with _process([sys.executable, "-m", module, *arguments, str(port)], 2.0) as process:
        _wait_until_it_answers(process, port)
        yield Server(port, psutil.Process(process.pid))


def _wait_until_it_answers(process: subprocess.Popen[Any], port: int, path: str = "/openapi.json") -> None:
    limit_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < limit_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not start")


@contextlib.contextmanager
def _process(
    command: list[str], stop_limit_s: float, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
    process = subprocess.Popen(command, cwd=_ROOT, env=environment, **options)
    try:
        yield process
    finally:
        try:
            children = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(stop_limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for left in psutil.wait_procs(children, timeout=10)[1]:
            left.kill()
        if process.stdout:
            process.stdout.close()
