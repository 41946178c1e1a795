"""What the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anychip_ascend.acl import card
from anychip_ascend.backend import AscendBackend
from backends import detect
from backends.vendors import table as vendors
from models.exports import exported
from tests.support import warm
from tests.support.cann_double import FOLDER, Cann, variables


@pytest.fixture(autouse=True)
def _warm_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are tried in children that need not import PyTorch; a test marked `cold` has the real ones."""
    if request.node.get_closest_marker("cold") is None:
        monkeypatch.setattr(exported, "subprocess", warm.SUBPROCESS)


@pytest.fixture
def cann(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cann]:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PATH", variables()["PATH"])
    import acl  # type: ignore[import-not-found]

    before = dict(acl.knobs)
    for cache in (card, detect.found):
        cache.cache_clear()
    backend = AscendBackend()
    monkeypatch.setattr(vendors, "_known", dict(vendors._known))
    vendors.learn(backend.facts)  # As a process that looks for backends does.
    yield Cann(acl, backend)
    acl.forget()
    acl.knobs.update(before)
    for cache in (card, detect.found):
        cache.cache_clear()
