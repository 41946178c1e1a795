"""Load on a running service, local or remote, in closed and in open loop.

Owns: a measurement and its row. Must not know how it is shown.
"""

from __future__ import annotations

import asyncio
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


class LoadedService:
    """Model of a service with its request made ready. Raises CommandError if it does not answer."""

    def __init__(
        self,
        url: str,
        model: str,
        protocol: endpoints.Protocol,
        image: bytes,
        *,
        batch: int = 1,
        binary: bool = True,
        key: str = "",
    ) -> None:
        """Ask for the model's inputs. `batch`: items in a request of tensors; `binary`: tensors as bytes, else JSON."""
        self._address = endpoints.address_of(url)
        self._url, self._protocol = url, protocol
        self.images = 1 if protocol == "predict" else batch
        host = f"{self._address.host}:{self._address.port}"
        self._rpc: RpcTarget | None = None
        self._request = b""
        if protocol == "grpc":
            self._rpc = RpcTarget(host, model, key)
            self._tensors = endpoints.tensors_of(self._rpc.described(), batch, image)
        elif protocol == "v2":
            tensors = endpoints.tensors_of(endpoints.described(url, model, key), batch, image)
            self._request = endpoints.infer_request(model, tensors, host, key, binary=binary)
        else:
            self._request = endpoints.predict_request(model, image, host, key)
        allow_many_connections()

    def closed(self, connections: int, seconds: float) -> dict[str, Any]:
        """Load over so many connections (gRPC: calls); each sends its next request after the last answer."""
        load = self._closed(connections, seconds)
        if not load.latencies_s:
            raise CommandError(f"{self._url} gave no good answer: {load.errors or 'none came'}")
        return {
            "protocol": self._protocol,
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
            "protocol": self._protocol,
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
            raise CommandError(f"nothing answers at {self._url}: {error}") from None

    def _open(self, rate: float, seconds: float, timeout_s: float) -> OpenLoad:
        due_s = poisson_arrivals(rate, seconds, _SEED)
        if self._rpc is not None:
            return asyncio.run(self._rpc.open_loop(self._tensors, due_s, seconds=seconds, timeout_s=timeout_s))
        return drive_open(self._address, self._request, due_s, seconds=seconds, timeout_s=timeout_s)
