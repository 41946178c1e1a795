"""On what terms a request is answered, as its query and its headers say: the deadline and the priority."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from app.compat import torchserve
from app.config import Settings
from app.errors import ServiceError
from app.http.call import AsgiRequest
from app.http.routes import predict
from app.observability.recorder import Recorder

BEGAN_S = 1000.0
GIVEN: dict[str, Any] = {"models": "m", "timeout_ms": 30_000}
SETTINGS = Settings(**GIVEN)


def request(query, **headers):
    context = SimpleNamespace(started_s=BEGAN_S, recorder=Recorder())
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return AsgiRequest({"anychip": context, "query_string": query.encode(), "headers": named}, asyncio.Event().wait)


def terms_of(query="", **headers):
    """Return the terms of a prediction."""
    return predict.PredictCall(request(query, **headers), "m").terms(SETTINGS)


@pytest.mark.parametrize(
    ("query", "header", "seconds"),
    [
        ("", None, 30),
        ("", "250", 0.25),
        ("timeout_ms=400", None, 0.4),
        ("timeout_ms=400", "250", 0.4),
        ("timeout_ms=250", "400", 0.25),
        ("top_k=1", "250", 0.25),
        ("timeout_ms=0.001", None, 1e-6),
    ],
)
def test_a_deadline_is_of_the_query_else_of_the_header_else_the_services(query, header, seconds):
    headers = {} if header is None else {"x_timeout_ms": header}
    assert terms_of(query, **headers).deadline_s == pytest.approx(BEGAN_S + seconds)


@pytest.mark.parametrize("timeout_ms", ["600000", "600001", "1e6", "1e9"])
def test_a_deadline_is_at_most_ten_minutes_away(timeout_ms):
    assert terms_of(x_timeout_ms=timeout_ms).deadline_s == BEGAN_S + 600
    assert terms_of(f"timeout_ms={timeout_ms}").deadline_s == BEGAN_S + 600
    settings = SETTINGS.model_copy(update={"timeout_ms": float(timeout_ms)})
    assert predict.PredictCall(request(""), "m").terms(settings).deadline_s == BEGAN_S + 600


@pytest.mark.parametrize("timeout_ms", ["0", "-1", "0.0001", "1.1e9", "1e300", "inf", "nan", "", "soon"])
def test_a_deadline_that_is_none_is_refused_wherever_it_stands(timeout_ms):
    for query, headers in ((f"timeout_ms={timeout_ms}", {}), ("", {"x_timeout_ms": timeout_ms})):
        with pytest.raises(ServiceError) as refused:
            terms_of(query, **headers)
        assert refused.value.code == "INVALID_REQUEST"
        assert "must be a number from 0.001 to 1e+09" in refused.value.message


@pytest.mark.parametrize("priority", [-100, -1, 0, 1, 100])
def test_a_priority_is_a_whole_number_from_minus_to_plus_a_hundred(priority):
    assert terms_of(x_priority=str(priority)).priority == priority
    assert terms_of().priority == 0


@pytest.mark.parametrize("priority", ["-101", "101", "1e9", "nan", "high", "", "0.5"])
def test_a_priority_beyond_is_refused(priority):
    with pytest.raises(ServiceError) as refused:
        terms_of(x_priority=priority)
    assert refused.value.code == "INVALID_REQUEST"
    assert "X-Priority must be" in refused.value.message


@pytest.mark.parametrize("path", ["/predictions/{model}", "/predictions/{model}/{version}"])
def test_torchserves_clients_may_put_what_they_may_post(path):
    methods = {method for route in torchserve.router.routes if route.path == path for method in route.methods}
    assert methods == {"POST", "PUT"}
