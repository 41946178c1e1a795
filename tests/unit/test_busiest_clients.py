"""Which clients are the busiest, of however many there are."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from app.observability.metrics import BUSIEST, BusiestClients


def test_a_flood_of_addresses_costs_bounded_memory_and_hides_nobody() -> None:
    clients = BusiestClients()
    for number in range(20_000):
        clients.count(f"10.0.{number >> 8}.{number & 255}", refused=True, now_s=number / 1000)
        if number % 10 == 0:
            clients.count("key:camera", refused=False, now_s=number / 1000)
    assert len(clients.busiest(10**6)) <= 1000
    assert (clients.busiest(1, now_s=20)[0].name, clients.busiest(1, now_s=20)[0].requests) == ("key:camera", 2000)


def test_prometheus_sees_ten_at_most() -> None:
    registry = CollectorRegistry()
    clients = BusiestClients()
    registry.register(clients)
    for number in range(50):
        for _ in range(number):
            clients.count(f"10.0.0.{number}", refused=number == 49)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert len(lines) == 2 * BUSIEST
    assert 'anychip_client_requests_total{client="10.0.0.49",outcome="refused"} 49.0' in lines
    assert 'anychip_client_requests_total{client="10.0.0.48",outcome="answered"} 48.0' in lines
    assert not any('"10.0.0.1"' in line for line in lines)
