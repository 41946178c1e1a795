"""Trial: a service with a candidate's settings, in a child process, under load over HTTP.

Owns: the load and the figures. Must not decide what is tried.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import httpx
import psutil

from anychip_tools.benchmark.endpoints import request_bytes
from anychip_tools.benchmark.load import drive
from anychip_tools.child_service import ServiceStartError, serving
from anychip_tools.tuning.search import Candidate, Trial

_START_LIMIT_S = 600.0
_WARM_UP_S = 1.0
_IDLE_LIMIT_S = 60.0
_IDLE_INTERVAL_S = 0.25
_IDLE_TIMES = 3
_IDLE_SHARE = 0.3
"""Share of one core."""
_MOST_CONNECTIONS = 128
_ENERGY = re.compile(r"^anychip_device_energy_joules_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Trials:
    """Trials of a model. `options`: of every service, as `anychip serve` takes them; `seconds`: of one measurement."""

    model: str
    options: Sequence[str]
    image: bytes
    seconds: float
    p99_ms: float
    devices: int

    def evaluate(self, candidate: Candidate) -> Trial:
        """Start, load and stop a service. A candidate that does not serve is a trial with its refusal."""
        options = (
            *self.options,
            *("--engine", candidate.engine, "--precision", candidate.precision),
            *("--batch-sizes", ",".join(map(str, candidate.batch_sizes))),
            *("--workers-per-device", str(candidate.workers), "--decoders", str(candidate.decoders)),
        )
        try:
            with serving(options) as service:
                served = self._settled(service.port, candidate)
                _wait_until_idle(service.process.pid)
                return self._measured(service.port, candidate, served)
        except ServiceStartError as error:
            return Trial(candidate, refusal=str(error))

    def _measured(self, port: int, candidate: Candidate, served: tuple[str, str]) -> Trial:
        request = request_bytes(f"/v1/models/{self.model}:predict", self.image, "image/jpeg")
        connections = 2 * candidate.batch_sizes[-1] * candidate.workers * self.devices
        connections = min(_MOST_CONNECTIONS, max(8, connections))
        drive(port, request, connections, _WARM_UP_S)
        while True:
            before_joules = self._joules(port)
            load = drive(port, request, connections, self.seconds)
            joules = self._joules(port) - before_joules
            if load.errors or not load.latencies_s:
                return Trial(candidate, refusal=f"requests failed: {load.errors}", served=served)
            trial = Trial(
                candidate,
                load.answers_per_s,
                load.percentile_ms(99),
                joules / len(load.latencies_s) if joules > 0 else nan,
                served=served,
            )
            if trial.p99_ms <= self.p99_ms or connections == 1:
                return trial
            connections = max(1, math.floor(connections * min(0.75, self.p99_ms / trial.p99_ms)))

    def _settled(self, port: int, candidate: Candidate) -> tuple[str, str]:
        """Wait for the wanted engine and precision, for which others may stand in at first; return both."""
        limit_s = time.monotonic() + _START_LIMIT_S
        while True:
            models = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=30, trust_env=False).json()["models"]
            served_on = next(each for each in models if each["name"] == self.model)["served_on"]
            served = [(each["engine"], each["precision"]) for each in served_on]
            # An engine may also stand in for itself: in bf16, as long as int8 is not ready.
            staged = any(each["staged"] for each in served_on)
            if served and not staged and all(candidate.engine in ("auto", engine) for engine, _ in served):
                return served[0]
            if time.monotonic() > limit_s:
                raise ServiceStartError(
                    f"{candidate.engine} {candidate.precision} was not ready within {_START_LIMIT_S:g} s"
                )
            time.sleep(0.5)

    def _joules(self, port: int) -> float:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30, trust_env=False).text
        found = [float(value) for value in _ENERGY.findall(text)]
        return sum(found) if found else nan


def _wait_until_idle(pid: int) -> None:
    """Wait until the service is almost idle: it computes for seconds after its first compilation."""
    limit_s = time.monotonic() + _IDLE_LIMIT_S
    before_s, quiet = _processor_s(pid), 0
    while quiet < _IDLE_TIMES and time.monotonic() < limit_s:
        time.sleep(_IDLE_INTERVAL_S)
        now_s = _processor_s(pid)
        quiet = quiet + 1 if 0 <= now_s - before_s <= _IDLE_SHARE * _IDLE_INTERVAL_S else 0
        before_s = now_s


def _processor_s(pid: int) -> float:
    """Return the processor time of a process and all its children, in seconds."""
    service = psutil.Process(pid)
    total_s = 0.0
    for process in (service, *service.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s
