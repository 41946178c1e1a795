"""A service a card behind one port: what dies with a card's service, what is asked of all cards, and the restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest

from app import cards
from app.fleet.breaker import Breaker
from tests.support.images import GREY
from tests.support.load import Load, until
from tests.support.null_service import PREDICT, serving
from tests.support.service_process import free_port

NULL = "devices=2,depth=2,output_mb=2,delay_ms=2"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    port = str(free_port())
    with serving(tmp_path_factory.mktemp("cards"), NULL, "--device", "null", "--port", port, "--per-card") as started:
        started.admin = f"http://127.0.0.1:{int(port) + 2}"
        yield started


def services(started):
    """The process of each card's service, by card."""
    found = {}
    for child in psutil.Process(started.process.pid).children():
        with contextlib.suppress(psutil.ZombieProcess):  # It has just ended, and another takes its place.
            if named := re.search(r"--device=(\S+)", " ".join(child.cmdline())):
                found[named[1]] = child
    return found


def by_card(started, name, **labels):
    text = httpx.get(f"{started.url}/metrics").text
    found = {}
    for line in text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            found[re.search(r'card="([^"]+)"', line)[1]] = float(line.rpartition(" ")[2])
    return found


def is_ready(started):
    return httpx.get(f"{started.url}/v2/health/ready").status_code == 200


async def test_all_cards_are_asked_at_one_port_and_answer_as_one(service):
    async with Load(service.url, PREDICT, GREY, 16) as load:
        await load.answers(100)
    assert set(load.outcomes) == {(200, "OK")}
    for address in (service.url, service.admin):
        devices = httpx.get(f"{address}/v1/devices").json()["devices"]
        assert [each["device"] for each in devices] == ["null:0", "null:1"]
        [model] = httpx.get(f"{address}/v1/models").json()["models"]
        assert [each["device"] for each in model["served_on"]] == ["null:0", "null:1"]
        stats = httpx.get(f"{address}/v1/stats").json()
        assert stats["models"][0]["requests"]["OK"] >= 100
    counted = by_card(service, "anychip_requests_total", code="OK")
    assert set(counted) == {"null:0", "null:1"}
    assert all(counted.values()), "the system deals connections out to both"
    assert sum(counted.values()) == load.outcomes.total()
    assert by_card(service, "anychip_card_up") == {"null:0": 1, "null:1": 1}


def test_what_changes_something_is_asked_of_each_card_at_the_administrations_port_alone(service):
    load = "/v2/repository/models/resnet18/load"
    assert httpx.post(f"{service.url}{load}").status_code == 403
    assert httpx.post(f"{service.admin}{load}", timeout=120).status_code == 200
    handed_over = by_card(service, "anychip_handovers_total", reason="load")
    assert handed_over == {"null:0": 1, "null:1": 1}
    assert httpx.post(f"{service.admin}/v1/devices/null:1:release").json()["device"] == "null:1"
    assert httpx.post(f"{service.admin}/v1/devices/null:7:release").json()["code"] == "NOT_FOUND"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_card_whose_service_dies_or_hangs_costs_its_own_connections_alone(service, number):
    before = by_card(service, "anychip_card_restarts_total")
    victim = services(service)["null:0"]
    async with Load(service.url, PREDICT, GREY, 16) as load:
        await load.answers(50)
        os.kill(victim.pid, number)
        await until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE)
        await load.answers(100)
        await until(lambda: by_card(service, "anychip_card_up") == {"null:0": 1, "null:1": 1})
        await load.answers(100)
    lost = sum(count for outcome, count in load.outcomes.items() if outcome[0] == 0)
    assert {outcome[0] for outcome in load.outcomes} <= {0, 200}
    assert lost <= 16, "each connection is lost once at most"
    after = by_card(service, "anychip_card_restarts_total")
    assert after == {"null:0": before["null:0"] + 1, "null:1": before["null:1"]}


async def test_one_card_after_the_other_is_restarted_without_a_lost_request(service):
    old = {card: process.pid for card, process in services(service).items()}
    before = by_card(service, "anychip_card_restarts_total")
    async with Load(service.url, PREDICT, GREY, 8) as load:
        await load.answers(50)
        service.process.send_signal(signal.SIGHUP)

        def restarted():
            now = {card: process.pid for card, process in services(service).items()}
            return len(now) == 2 and not set(now.values()) & set(old.values()) and is_ready(service)

        await until(restarted)
        await load.answers(50)
    assert by_card(service, "anychip_card_restarts_total") == before
    assert set(load.outcomes) == {(200, "OK")}


@asynccontextmanager
async def kept(*command):
    """A card's service that is this program, and whatever asks it hears that it is ready; ended within five seconds."""
    service = cards.CardService(cards.Card("npu:0"), lambda *_: command)
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as client:
        keeping = asyncio.create_task(service.keep(client))
        await asyncio.wait_for(service.first_ready.wait(), 20)
        yield service
        service.end()
        await asyncio.wait_for(keeping, 5)


async def test_a_broken_cards_pause_holds_up_no_end(monkeypatch):
    paused = asyncio.Event()

    def died(*_, **__):
        paused.set()
        return 60.0

    monkeypatch.setattr(Breaker, "died", died)
    async with kept("false"):
        await paused.wait()


async def test_a_service_that_cannot_be_started_is_tried_again_after_a_pause(monkeypatch):
    paused = asyncio.Event()
    monkeypatch.setattr(Breaker, "died", lambda *_, **__: paused.set() or 60.0)
    async with kept("/no/such/program") as service:
        await paused.wait()
        assert service.restarts == 1


async def test_a_restart_by_command_is_no_failure(caplog):
    async with kept("sleep", "600") as service:
        with caplog.at_level(logging.INFO, "anychip.cards"):
            assert await service.restart(20)
        assert service.restarts == 0
    assert [record.levelname for record in caplog.records] == ["INFO"]
