"""How often models are loaded and unloaded: so many in any minute."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import clock
from app.errors import ServiceError
from app.serving.administration import ServiceAdministration

MOST = 12


@given(st.lists(st.floats(0, 20), max_size=80))
async def test_no_minute_has_more_changes_than_are_allowed(pauses: list[float]) -> None:
    nothing = cast(Any, None)
    administration = ServiceAdministration(nothing, nothing, {}, nothing, {})
    now_s, begun = 1000.0, list[float]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "monotonic", lambda: now_s)
        for pause_s in pauses:
            now_s += pause_s
            within = [each for each in begun if now_s - each < 60]
            if len(within) < MOST:
                async with administration._begun():
                    begun.append(now_s)
                continue
            with pytest.raises(ServiceError, match="12 times a minute") as refused:
                await administration._begun().__aenter__()
            assert 0 < (refused.value.retry_after_s or 0) <= 60
