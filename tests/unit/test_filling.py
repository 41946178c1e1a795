"""What becomes of an image whose client left while a decoder had it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.decoding.waiting import DecodeFailedError
from app.link import Terms
from app.scheduling.queue import ItemStatus
from app.serving.filling import Filling
from tests.support.doubles import Decoders


@pytest.mark.parametrize(("status", "lines"), [(ItemStatus.ENDED, 0), (ItemStatus.FILLING, 1)])
def test_an_image_that_nobody_waits_for_is_no_error(
    status: ItemStatus, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    filled: list[Any] = []
    decoders = Decoders()
    filling = Filling(
        cast(Any, None), 10**9, cast(Any, decoders), lambda _, outcome: filled.append(outcome), reads_pixels=True
    )
    pool = SimpleNamespace(index=0, passes_files=False)
    item: Any = SimpleNamespace(terms=Terms(0.0), pool=pool, slot=0, position=0, status=ItemStatus.FILLING)
    filling.fill([item], b"image")
    item.status = status
    decoders.end(DecodeFailedError("it is not wanted any more"))
    assert len(filled) == 1, "its slot comes back"
    assert len(caplog.records) == lines
