"""Load on a running service, local or remote: closed loop over numbers of connections, open loop over rates.

Owns: the order of measurements and their rows. Must not know how they are shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anychip_tools.benchmark import endpoints
from anychip_tools.benchmark.load import (
    ClosedLoad,
    OpenLoad,
    allow_many_connections,
    drive,
    drive_open,
    percentile,
    poisson_arrivals,
)
from anychip_tools.benchmark.rpc_load import RpcTarget
from app.arguments import CommandError

_WARM_UP_S = 1.0
_SEED = 0


@dataclass(frozen=True)
class Target:
    """Model of a service. `batch`: items in a request of tensors; `binary`: tensors as bytes, else as JSON."""

    url: str
    model: str
    protocol: endpoints.Protocol
    image: bytes
    batch: int = 1
    binary: bool = True
    key: str = ""


class LoadedService:
    """Target with its request made ready. Raises CommandError if it does not answer."""

    def __init__(self, target: Target) -> None:
        self._address = endpoints.address_of(target.url)
        self._target = target
        self.images = 1 if target.protocol == "predict" else target.batch
        host = f"{self._address.host}:{self._address.port}"
        self._rpc: RpcTarget | None = None
        self._request = b""
        if target.protocol == "grpc":
            self._rpc = RpcTarget(host, target.model, target.key)
            self._tensors = endpoints.tensors_of(self._rpc.described(), target.batch, target.image)
        elif target.protocol == "v2":
            inputs = endpoints.described(target.url, target.model, target.key)
            tensors = endpoints.tensors_of(inputs, target.batch, target.image)
            self._request = endpoints.infer_request(target.model, tensors, host, target.key, binary=target.binary)
        else:
            self._request = endpoints.predict_request(target.model, target.image, host, target.key)
        allow_many_connections()

    def closed(self, connections: int, seconds: float) -> dict[str, Any]:
        """Load over so many connections (gRPC: calls); each sends its next request after the last answer."""
        load = self._closed(connections, seconds)
        if not load.latencies_s:
            raise CommandError(f"{self._target.url} gave no good answer: {load.errors or 'none came'}")
        return {
            "protocol": self._target.protocol,
            "mode": "closed",
            "connections": connections,
            "batch": self.images,
            "images_per_s": load.answers_per_s * self.images,
            "answers_per_s": load.answers_per_s,
            **{f"p{percent}_ms": load.percentile_ms(percent) for percent in (50, 90, 99)},
            "errors": sum(load.errors.values()),
            "errors_by_status": dict(load.errors),
        }

    def open(self, rate: float, seconds: float, timeout_s: float) -> dict[str, Any]:
        """Load at random times, at this mean rate, even if earlier requests are unanswered."""
        load = self._open(rate, seconds, timeout_s)
        latencies_s = [each.latency_s for each in load.accepted]
        return {
            "protocol": self._target.protocol,
            "mode": "open",
            "rate": rate,
            "batch": self.images,
            "goodput_per_s": load.goodput_per_s * self.images,
            "images_per_s": sum(each.arrived_s <= load.seconds for each in load.accepted) / seconds * self.images,
            **{f"p{percent}_ms": percentile(latencies_s, percent) * 1e3 for percent in (50, 90, 99)},
            "errors": sum(load.refused.values()) + load.connection_errors + load.unanswered,
            "errors_by_status": {**load.refused, "unanswered": load.unanswered, "connection": load.connection_errors},
            "lateness_p99_ms": percentile(load.lateness_s, 99) * 1e3,
        }

    def warm_up(self) -> None:
        """Load for a second, so that first connections, pages and batches are not measured."""
        self._closed(4, _WARM_UP_S)

    def _closed(self, connections: int, seconds: float) -> ClosedLoad:
        if self._rpc is not None:
            return asyncio.run(self._rpc.closed_loop(self._tensors, connections, seconds))
        try:
            return drive(self._address, self._request, connections, seconds)
        except OSError as error:
            raise CommandError(f"nothing answers at {self._target.url}: {error}") from None

    def _open(self, rate: float, seconds: float, timeout_s: float) -> OpenLoad:
        due_s = poisson_arrivals(rate, seconds, _SEED)
        if self._rpc is not None:
            return asyncio.run(self._rpc.open_loop(self._tensors, due_s, seconds=seconds, timeout_s=timeout_s))
        return drive_open(self._address, self._request, due_s, seconds=seconds, timeout_s=timeout_s)


def measure(
    target: Target,
    connections: Sequence[int],
    rates: Sequence[float],
    *,
    seconds: float,
    timeout_s: float,
    done: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure every number of connections in closed loop, then every rate in open loop. Raises CommandError."""
    service = LoadedService(target)
    service.warm_up()
    rows = []
    for count in connections:
        rows.append(service.closed(count, seconds))
        done()
    for rate in rates:
        rows.append(service.open(rate, seconds, timeout_s))
        done()
    return rows
