"""What a worker tells of its releases: bytes of the device and of the host apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.worker import memory
from app.worker.guard import LeakLimits
from app.worker.memory import MemoryWatch
from app.worker.messages import Released
from backends import Memory, Telemetry


class Card:
    """A backend whose release gives back bytes of the device and pinned memory of the host."""

    name = "card"
    facts = SimpleNamespace(host_memory=False)

    def __init__(self) -> None:
        self.used, self.resident = 1000, 5000

    def memory(self, device: str) -> Memory:
        return Memory(100, self.used, self.used, 10_000)

    def telemetry(self, device: str) -> Telemetry:
        return Telemetry()

    def release_cache(self, device: str) -> int:
        self.used -= 300
        self.resident -= 40
        return 300


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(memory, "_resident", lambda: made.resident)
    return made


def test_a_release_on_demand_tells_device_and_host_apart(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def collect() -> None:
        card.used -= 20
        card.resident -= 7

    monkeypatch.setattr(memory, "gc", SimpleNamespace(collect=collect))
    backend: Any = card
    assert MemoryWatch(backend, "card:0", LeakLimits("off")).release() == Released(
        "request", {1: 20, 2: 300}, {1: 7, 2: 40}
    )


def test_releases_that_a_batch_forced_are_told_after_it(card: Card) -> None:
    backend: Any = card
    watch = MemoryWatch(backend, "card:0", LeakLimits("off"))
    assert watch.make_room()
    assert not watch.make_room(), "a second one does not help"
    told: list[Any] = []
    watch.after_batch(told.append)
    watch.after_batch(told.append)
    assert told == [Released("out_of_memory", {2: 600}, {2: 80})]
