"""Which versions may be given a share of a model's requests, and how often models are loaded and unloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import clock
from app.errors import ServiceError
from app.link import ModelState
from app.serving.administration import ServiceAdministration


def administration(**states: ModelState) -> ServiceAdministration:
    """Make that of a service whose models `m`, `m@2`, … have these states, named `m1`, `m2`, …"""
    by_name: Any = {"m" if name == "m1" else f"m@{name[1:]}": state for name, state in states.items()}
    readiness = SimpleNamespace(state=by_name.__getitem__, reason=lambda name: f"{name} is {by_name[name].value}")
    fleet: Any = SimpleNamespace(readiness=readiness, replicas=[object()])
    nothing: Any = None
    return ServiceAdministration(nothing, fleet, by_name, nothing, {})


@pytest.mark.parametrize("state", [ModelState.UNLOADED, ModelState.UNAVAILABLE])
def test_what_cannot_answer_is_given_nothing_and_what_was_stays(state: ModelState) -> None:
    owner = administration(m1=ModelState.READY, m2=state)
    owner.set_traffic("m", {"1": 1, "2": 0})
    with pytest.raises(ServiceError, match=r"^m@2 would answer nothing: m@2 is ") as refused:
        owner.set_traffic("m", {"1": 1, "2": 1})
    assert refused.value.code == "NOT_READY"
    assert owner.traffic == {"m": {"1": 1, "2": 0}}


@pytest.mark.parametrize("state", [ModelState.READY, ModelState.STARTING, ModelState.ON_DEMAND])
def test_what_can_answer_or_will_soon_is_given_what_is_said(state: ModelState) -> None:
    owner = administration(m1=ModelState.READY, m2=state)
    owner.set_traffic("m", {"2": 1})
    assert owner.traffic == {"m": {"2": 1}}


MOST = 12


@given(st.lists(st.floats(0, 20), max_size=80))
async def test_no_minute_has_more_changes_than_are_allowed(pauses: list[float]) -> None:
    owner = administration()
    now_s, begun = 1000.0, list[float]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "monotonic", lambda: now_s)
        for pause_s in pauses:
            now_s += pause_s
            within = [each for each in begun if now_s - each < 60]
            if len(within) < MOST:
                async with owner._begun():
                    begun.append(now_s)
                continue
            with pytest.raises(ServiceError, match="12 times a minute") as refused:
                await owner._begun().__aenter__()
            assert 0 < (refused.value.retry_after_s or 0) <= 60
