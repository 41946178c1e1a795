"""What the tests of this room share."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from models import exported
from tests.support.warm import WarmScript


@pytest.fixture(autouse=True)
def _warm_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are tried in children that need not import PyTorch; a test marked `cold` has the real ones."""
    if request.node.get_closest_marker("cold") is None:
        given = SimpleNamespace(Popen=WarmScript, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(exported, "subprocess", given)
