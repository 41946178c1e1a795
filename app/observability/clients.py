"""Busiest clients, by a key's name, or by address without keys.

Owns: the bounded memory of clients, and the choice of the busiest now. Must not limit anybody: that is
app.access.limits's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from app import clock

BUSIEST = 10
_REMEMBERED = 1000
"""Most clients remembered; above it the idler half is forgotten."""
_HALF_LIFE_S = 30.0


@dataclass(slots=True)
class ClientCount:
    """Requests of a client since it is remembered; `refused`: those that ended with an error."""

    name: str
    requests: int = 0
    refused: int = 0
    weight: float = 0.0
    seen_s: float = 0.0

    def busy(self, now_s: float) -> float:
        """Return the number of its requests, each worth half after half a minute."""
        return self.weight * float(2 ** ((self.seen_s - now_s) / _HALF_LIFE_S))


class BusiestClients(Collector):
    """Counter of one service's clients. Counted in the event loop, read by any thread."""

    def __init__(self) -> None:
        self._clients: dict[str, ClientCount] = {}

    def count(self, name: str, *, refused: int, requests: int = 1, now_s: float | None = None) -> None:
        """Count ended requests of this client, of which so many were refused."""
        now_s = clock.monotonic() if now_s is None else now_s
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= _REMEMBERED:
                self._clients = {each.name: each for each in self.busiest(_REMEMBERED // 2, now_s)}
            client = self._clients[name] = ClientCount(name)
        client.requests += requests
        client.refused += refused
        client.weight, client.seen_s = client.busy(now_s) + requests, now_s

    def taken(self) -> dict[str, tuple[int, int]]:
        """Return requests and refusals by client, and forget them."""
        clients, self._clients = self._clients, {}
        return {name: (each.requests, each.refused) for name, each in clients.items()}

    def busiest(self, most: int = BUSIEST, now_s: float | None = None) -> list[ClientCount]:
        """Return at most so many clients, the busiest of the last minute first."""
        now_s = clock.monotonic() if now_s is None else now_s
        clients = list(self._clients.values())  # At once: another thread may count meanwhile.
        return sorted(clients, key=lambda each: each.busy(now_s), reverse=True)[:most]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the requests of the busiest clients only."""
        text = f"Requests of the {BUSIEST} busiest clients now, by key or address"
        family = CounterMetricFamily("anychip_client_requests", text, labels=("client", "outcome"))
        for each in self.busiest():
            family.add_metric((each.name, "answered"), each.requests - each.refused)
            family.add_metric((each.name, "refused"), each.refused)
        yield family
