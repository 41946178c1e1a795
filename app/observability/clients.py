"""Who asks most: a key's name, or an address where there are no keys.

Owns: which clients are remembered, as there may be any number of them, and which of those are the busiest now. Must not
limit anybody: that is app.access.limits's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from app import clock

BUSIEST = 10
_REMEMBERED = 1000
"""Beyond so many the idler half is forgotten."""
_HALF_LIFE_S = 30.0


@dataclass(slots=True)
class ClientCount:
    """A client's requests since it is remembered; `refused`: those that ended with an error."""

    name: str
    requests: int = 0
    refused: int = 0
    weight: float = 0.0
    seen_s: float = 0.0

    def busy(self, now_s: float) -> float:
        """Its requests, each worth half after half a minute."""
        return self.weight * float(2 ** ((self.seen_s - now_s) / _HALF_LIFE_S))


class BusiestClients(Collector):
    """Of one service. Counted in the event loop, read by any thread."""

    def __init__(self) -> None:
        self._clients: dict[str, ClientCount] = {}

    def count(self, name: str, *, refused: int, requests: int = 1, now_s: float | None = None) -> None:
        """Requests of this client have ended, of which so many were refused."""
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
        """Requests by client, and those refused; they are forgotten here."""
        clients, self._clients = self._clients, {}
        return {name: (each.requests, each.refused) for name, each in clients.items()}

    def busiest(self, most: int = BUSIEST, now_s: float | None = None) -> list[ClientCount]:
        """So many at most, the busiest of the last minute first."""
        now_s = clock.monotonic() if now_s is None else now_s
        clients = list(self._clients.values())  # At once: another thread may count meanwhile.
        return sorted(clients, key=lambda each: each.busy(now_s), reverse=True)[:most]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Requests of the busiest, those that others have pushed out of them left out."""
        text = f"Requests of the {BUSIEST} busiest clients now, by key or address"
        family = CounterMetricFamily("anychip_client_requests", text, labels=("client", "outcome"))
        for each in self.busiest():
            family.add_metric((each.name, "answered"), each.requests - each.refused)
            family.add_metric((each.name, "refused"), each.refused)
        yield family
