"""A process that reads models and dies, or never was: what a reload is answered, what is logged, what is left over."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.config import Settings
from app.errors import ServiceError
from app.fleet.handover import Handovers
from app.observability.metrics import Metrics
from app.precision.described import described
from app.processes.channel import Channel, socket_pair, to_packet
from app.processes.place import Child
from app.serving import opening
from app.serving.administration import ServiceAdministration
from app.serving.opening import Opened, Opening, OpeningError, Refused
from app.worker.main import Begin
from models import ModelError, open_model, parse_spec

FIRST_BYTES = 2_000_000
Dies = Callable[[Channel], None]
GIVEN: dict[str, Any] = {"models": "resnet50", "weights": "sample"}


def with_(*messages: bytes) -> Dies:
    def die(channel: Channel) -> None:
        for message in messages:
            channel.send(message)
        channel.close()

    return die


DEATHS: dict[str, tuple[Dies, str]] = {
    "before it is asked": (Channel.close, "the process that reads models has ended, exit code -9"),
    "while it reads": (
        with_(to_packet(["1 of 2"])),
        "the process that reads models has ended, exit code -9",
    ),
    "with what is no answer": (with_(b"\xc1"), "the process that reads models has ended, exit code -9"),
    "with an answer and no models": (
        with_(to_packet([Opened({}, [])])),
        "the process that reads models cannot be begun or heard: a descriptor is missing",
    ),
    "with an error of its own": (with_(to_packet([Refused("", "no space left")])), "no space left"),
}


class Processes:
    """Stand-in for what starts processes: each dies as `dies` says, before the server has told it anything."""

    def __init__(self, dies: Dies | None) -> None:
        self.dies = dies
        self.killed = 0

    async def spawn(self, begin: Begin, *, forks: bool) -> tuple[Child, Channel]:
        if self.dies is None:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        ours, theirs = socket_pair()
        exited = asyncio.get_running_loop().create_future()
        exited.set_result(-9)

        async def ends_within(limit_s: float) -> bool:
            return True

        def kill() -> None:
            self.killed += 1

        self.dies(Channel(theirs))
        child: Any = SimpleNamespace(pid=1, exited=exited, kill=kill, ends_within=ends_within)
        return child, Channel(ours)


def administration() -> ServiceAdministration:
    model = described(open_model(parse_spec("resnet50", "sample"), Path(), allow_download=False))
    pool: Any = SimpleNamespace(model=model, unloaded=False)
    fleet: Any = SimpleNamespace(handovers=Handovers((), Settings(**GIVEN), Metrics()))
    return ServiceAdministration(Settings(**GIVEN), fleet, {"resnet50": pool}, cast(Any, None), {})


@pytest.mark.parametrize("how", DEATHS)
async def test_a_reload_whose_reading_process_dies_is_refused_and_leaves_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dies, reason = DEATHS[how]
    processes = Processes(dies)
    monkeypatch.setattr(opening, "spawn", processes.spawn)
    served = administration()
    descriptors, tasks = len(os.listdir("/proc/self/fd")), asyncio.all_tasks()
    for _ in range(2):  # The second one is not refused because of the first.
        caplog.clear()
        with pytest.raises(ServiceError) as refused:
            await served.load("resnet50")
        assert refused.value.code == "INTERNAL"
        assert refused.value.message == "the model could not be read; quote the request id"
        [record] = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert (record.getMessage(), record.exc_info) == (f"load: resnet50 could not be read: {reason}", None)
    await asyncio.sleep(0)
    assert (len(os.listdir("/proc/self/fd")), asyncio.all_tasks()) == (descriptors, tasks)
    assert processes.killed == 2


@pytest.mark.parametrize("how", DEATHS)
async def test_a_start_whose_reading_process_dies_ends_with_one_sentence(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.cli import _known_errors

    dies, reason = DEATHS[how]
    monkeypatch.setattr(opening, "spawn", Processes(dies).spawn)
    with pytest.raises(OpeningError) as failed:
        await Opening().apart(Settings(**GIVEN))
    assert str(failed.value) == reason
    assert isinstance(failed.value, _known_errors())


async def test_a_first_message_that_the_socket_does_not_take_at_once_is_sent_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large environment does not fit."""
    processes = Processes(Channel.close)
    heard: list[int] = []

    def read(channel: Channel) -> None:
        while len(heard) < 2:
            channel.wait(None)
            heard.extend(map(len, channel.receive()))
        channel.send(to_packet([Refused("", "all of it came")]))
        channel.close()

    async def spawn(begin: Begin, *, forks: bool) -> tuple[Child, Channel]:
        ours, theirs = socket_pair()
        channel, (child, unused) = Channel(ours), await processes.spawn(begin, forks=forks)
        unused.close()
        channel.send(bytes(FIRST_BYTES))
        asyncio.get_running_loop().run_in_executor(None, read, Channel(theirs))
        return child, channel

    monkeypatch.setattr(opening, "spawn", spawn)
    with pytest.raises(OpeningError, match="all of it came"):
        await asyncio.wait_for(Opening().apart(Settings(**GIVEN)), 60)
    assert heard[0] == FIRST_BYTES


def test_a_model_is_read_again_though_the_folder_of_another_one_has_gone(tmp_path: Path) -> None:
    given: dict[str, Any] = {"models": f"other={tmp_path / 'gone'},m=resnet18:random", "cache_dir": tmp_path}
    [model] = Opening().models(Settings(**given), "m")
    assert model.name == "m"
    for only in ("other", ""):
        with pytest.raises(ModelError, match=r"There is no folder '.*gone'"):
            Opening().models(Settings(**given), only)
