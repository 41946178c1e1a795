"""What the tests of this room share."""

from __future__ import annotations

import pytest

from models.exports import exported
from tests.support import warm


@pytest.fixture(autouse=True)
def _warm_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are tried in children that need not import PyTorch; a test marked `cold` has the real ones."""
    if request.node.get_closest_marker("cold") is None:
        monkeypatch.setattr(exported, "subprocess", warm.SUBPROCESS)
