"""The virtual room: each test has a loop in virtual time, which is the app's clock, too. No process, no network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from tests.support.virtual_time import VirtualLoop, as_clock


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return one, which no test's name has to say."""
    return {"virtual": VirtualLoop}


@pytest.fixture(autouse=True)
async def _clock() -> AsyncIterator[None]:
    with as_clock(asyncio.get_running_loop()):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> object:
    return tmp_path_factory.mktemp("virtual")
