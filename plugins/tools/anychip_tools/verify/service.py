"""Service on the device: load, a worker that dies, a hand-over, releases, and telemetry meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from anychip_tools.child_service import ServiceStartError, serving
from anychip_tools.verify.report import Finding
from app.precision.probes import probe_files

_RECOVERY_LIMIT_S = 240.0
_CLIENTS = 16
_REQUEST_TIMEOUT_S = 300.0
_LOOK_S = 0.1


@contextlib.contextmanager
def _clients(url: str, model: str) -> Iterator[Counter[str]]:
    """Post the sample images during the block; yield the counts of the answers by status, complete at its end."""
    statuses: Counter[str] = Counter()
    stopped, lock = threading.Event(), threading.Lock()
    headers = {"Content-Type": "image/jpeg", "X-Timeout-Ms": str(int(_REQUEST_TIMEOUT_S * 1000))}
    files = probe_files()

    def post(number: int) -> None:
        # The service speaks plain HTTP: no certificate authorities are read.
        options: Any = {"timeout": _REQUEST_TIMEOUT_S, "trust_env": False, "headers": headers, "verify": False}
        with httpx.Client(base_url=url, **options) as client:
            while not stopped.is_set():
                try:
                    answer = client.post(f"/v1/models/{model}:predict", content=files[number % len(files)])
                    status = str(answer.status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                with lock:
                    statuses[status] += 1

    with ThreadPoolExecutor(_CLIENTS) as pool:
        posting = [pool.submit(post, number) for number in range(_CLIENTS)]
        try:
            yield statuses
        finally:
            stopped.set()
    for each in posting:
        each.result()


def run_service(options: Sequence[str], models: Sequence[str], seconds: float) -> Iterator[Finding]:
    """Start the service with `options`, and run every check in turn. Raises ServiceStartError."""
    settings = ("--host", "127.0.0.1", "--admin", "port", "--models", ",".join(models), "--weights", "sample", *options)
    began_s = time.perf_counter()
    with serving(settings, own_session=False) as (port, process):
        url = f"http://127.0.0.1:{port}"
        client = httpx.Client(base_url=url, timeout=_REQUEST_TIMEOUT_S, trust_env=False)
        yield Finding("start", "PASS", "", {"start_s": round(time.perf_counter() - began_s, 1)})
        served = client.get("/v1/models").json()["models"]
        for model in served:
            where = model["served_on"][0]
            yield Finding(f"{model['name']} is served", "PASS", f"{where['engine']} {where['precision']}")
        for model in models:
            yield _loaded(url, model, seconds)
        yield _killed(client, process, models[0])
        yield _handed_over(client, process, models[0])
        devices = [device["device"] for device in client.get("/v1/devices").json()["devices"]]
        refused = [device for device in devices if client.post(f"/v1/devices/{device}:release").status_code >= 300]
        yield Finding("release of memory", "FAIL" if refused else "PASS", f"refused: {refused}" if refused else "")
        names = sorted(set(re.findall(r"^(anychip_device_\w+)\{", client.get("/metrics").text, re.MULTILINE)))
        yield Finding("telemetry", "PASS" if names else "FAIL", ", ".join(names) or "no metric of the device")
        client.close()
        if process.poll() is not None:
            raise ServiceStartError("the service ended by itself")
    code = process.returncode
    yield Finding("stop", "PASS" if code == 0 else "FAIL", f"ended with {code}")


def _loaded(url: str, model: str, seconds: float) -> Finding:
    with _clients(url, model) as statuses:
        _until_answers(statuses)  # A busy machine needs seconds to start so many clients.
        began_s, before = time.perf_counter(), statuses["200"]
        time.sleep(seconds)
    rate = (statuses["200"] - before) / (time.perf_counter() - began_s)
    good = set(statuses) == {"200"}
    figures = {"clients": float(_CLIENTS), "answers_per_s": round(rate, 1)}
    return Finding(f"{model} over HTTP", "PASS" if good else "FAIL", _counted(statuses), figures)


def _killed(client: httpx.Client, process: subprocess.Popen[str], model: str) -> Finding:
    """Kill the worker that serves, under load: no request is lost, and another worker starts and answers.

    The oldest worker serves: a younger one may be compiling beside it. A new process is therefore no sign of recovery;
    a counted restart is one.
    """
    victim = min(_workers(process), key=lambda pid: psutil.Process(pid).create_time())
    restarts = _restarts(client)
    with _clients(str(client.base_url), model) as statuses:
        os.kill(victim, signal.SIGKILL)
        took_s = _seconds_until(lambda: _restarts(client) > restarts and client.get("/v2/health/ready").is_success)
        _until_answers(statuses)
    return _finding("a worker is killed", statuses, took_s)


def _handed_over(client: httpx.Client, process: subprocess.Popen[str], model: str) -> Finding:
    before = _workers(process)
    with _clients(str(client.base_url), model) as statuses:
        answer = client.post(f"/v2/repository/models/{model}/load")
        took_s = _seconds_until(lambda: _replaced(before, process) and client.get("/v2/health/ready").is_success)
        _until_answers(statuses)
    if answer.status_code != 200:
        return Finding("a hand-over", "FAIL", f"{answer.status_code} {answer.text[:200]}")
    return _finding("a hand-over", statuses, took_s)


def _finding(name: str, statuses: Counter[str], took_s: float | None) -> Finding:
    if took_s is None:
        return Finding(name, "FAIL", f"no new worker after {_RECOVERY_LIMIT_S:.0f} s; {_counted(statuses)}")
    good = set(statuses) == {"200"}
    return Finding(name, "PASS" if good else "FAIL", _counted(statuses), {"recovery_s": round(took_s, 1)})


def _workers(service: subprocess.Popen[str]) -> set[int]:
    found = set()
    for child in psutil.Process(service.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # It has just ended.
            if child.name() == "anychip-worker":
                found.add(child.pid)
    return found


def _replaced(before: set[int], process: subprocess.Popen[str]) -> bool:
    now = _workers(process)
    return not before & now and bool(now)


def _restarts(client: httpx.Client) -> int:
    return sum(sum(device["restarts"].values()) for device in client.get("/v1/stats").json()["devices"])


def _until_answers(statuses: Counter[str]) -> None:
    """Wait until one more answer has come, of any status; without one the finding fails by itself."""
    before = statuses.total()
    _seconds_until(lambda: statuses.total() > before)


def _seconds_until(condition: Callable[[], bool]) -> float | None:
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < _RECOVERY_LIMIT_S:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return time.perf_counter() - began_s
        time.sleep(_LOOK_S)
    return None


def _counted(statuses: Counter[str]) -> str:
    return ", ".join(f"{count} times {status}" for status, count in sorted(statuses.items())) or "no answer"
