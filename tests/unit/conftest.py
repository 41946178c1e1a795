"""The unit room starts no process: a test that tries to is stopped, and fails also where its refusal is caught."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.no_processes import GUARD

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
def _starts_no_process() -> Iterator[None]:
    yield
    assert not GUARD.tried
