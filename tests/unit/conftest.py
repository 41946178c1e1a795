"""The unit room starts no process: a test that tries to is stopped, and fails also where its refusal is caught."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest

from app import telling
from tests.support.no_processes import GUARD
from tests.support.virtual_time import VirtualLoop, as_clock

ROOM = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """From the first fixture of a test to the last, those of a module included.

    pytest calls this hook for the tests of every room once one of this room has been collected.
    """
    if not item.path.is_relative_to(ROOM):
        return (yield)
    GUARD.tried = []
    try:
        return (yield)
    finally:
        GUARD.tried = None


@pytest.fixture(autouse=True)
def _starts_no_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with open(os.devnull, "wb") as nowhere:
        monkeypatch.setattr(telling, "_pipes", [nowhere.fileno()])  # As if a process that prints were there.
        yield
    assert not GUARD.tried


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return a loop in virtual time for tests with the `virtual_time` fixture, else one of asyncio's."""
    is_virtual = "virtual_time" in getattr(item, "fixturenames", ())
    return {"loop": VirtualLoop if is_virtual else asyncio.new_event_loop}


@pytest.fixture
async def virtual_time() -> AsyncIterator[None]:
    """Put the test's loop and the app's clock into virtual time."""
    with as_clock(asyncio.get_running_loop()):
        yield
