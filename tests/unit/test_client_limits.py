"""What one caller may have under way, and that it is all given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.access.access import Caller
from app.access.keys import CallerLimits
from app.access.limits import ClientLease, ClientLimits
from app.errors import ServiceError
from app.link import Terms, measured
from app.serving.filling import Filling
from tests.support.images import png

WIDE = png(size=(20, 5))


def caller(name: str = "a", **limits: float) -> Caller:
    return Caller(name, CallerLimits(**limits))  # type: ignore[arg-type]


def held(limits: ClientLimits, caller: Caller) -> ClientLease:
    """Return the lease of a request by a caller who has limits."""
    lease = limits.request(caller)
    assert isinstance(lease, ClientLease)
    return lease


def refused(attempt: object, *arguments: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        attempt(*arguments)  # type: ignore[operator]
    return caught.value


def test_so_many_requests_at_a_time_of_each_caller() -> None:
    limits = ClientLimits()
    busy = caller(requests=2)
    with limits.request(busy), limits.request(busy):
        assert refused(limits.request(busy).__enter__).code == "QUEUE_FULL"
        with limits.request(caller("b", requests=2)):
            pass
    with limits.request(busy):
        pass
    assert len(limits) == 0, "who asks nothing is forgotten"


def test_bytes_and_pixels_are_held_until_the_request_ends() -> None:
    limits = ClientLimits()
    limited = caller(bytes=100, pixels=1000)
    with held(limits, limited) as first:
        first.hold_bytes(60)
        first.hold_pixels(900)
        with held(limits, limited) as second:
            assert "100 bytes" in refused(second.hold_bytes, 41).message
            second.hold_bytes(40)
            assert "1000 pixels" in refused(second.hold_pixels, 101).message
    with held(limits, limited) as third:
        third.hold_bytes(100)
        third.hold_pixels(1000)
        assert third.counts_pixels
    assert not caller().limits.pixels


def test_images_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("app.clock.monotonic", lambda: now_s)
    limits = ClientLimits()
    limited = caller(images_per_s=4)
    with held(limits, limited) as client_lease:
        client_lease.admit_images(4)
        error = refused(client_lease.admit_images, 2)
        assert (error.code, error.retry_after_s) == ("QUEUE_FULL", 1)
    assert len(limits) == 1, "its rate is remembered"
    now_s += 0.5
    with held(limits, limited) as client_lease:
        client_lease.admit_images(2)
        assert refused(client_lease.admit_images, 1).code == "QUEUE_FULL"
    now_s += 10
    with held(limits, limited) as client_lease:
        client_lease.admit_images(1)
    now_s += 10
    with held(limits, limited):
        pass
    assert len(limits) == 0


@pytest.mark.parametrize("limited", [True, False])
def test_pixels_of_an_image_are_counted_by_its_header_also_where_it_is_looked_at_in_tiles(limited: bool) -> None:
    filled: list[Any] = []
    filling = Filling(
        cast(Any, None), 10**9, None, lambda item, error: filled.append(error or item.placement), reads_pixels=False
    )
    with ClientLimits().request(caller(pixels=150 if limited else 0)) as client_lease:
        item: Any = SimpleNamespace(terms=Terms(0.0, client_lease=client_lease))
        assert measured(WIDE, client_lease, 10**9) == (20, 5)
        filling.fill([item], WIDE)
        if limited:
            assert "150 pixels" in refused(measured, WIDE, client_lease, 10**9).message
            assert [error.code for error in filled] == ["QUEUE_FULL"]
        else:
            assert [(placement.width, placement.height) for placement in filled] == [(20, 5)]


def test_priorities_are_for_those_who_may() -> None:
    asking = caller(priority=5)
    asking.check_priority(5)
    asking.check_priority(-100)
    assert refused(asking.check_priority, 6).code == "FORBIDDEN"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_whatever_is_held_comes_back(asked: list[tuple[str, int, int]]) -> None:
    limits = ClientLimits()
    for name, size, pixels in asked:
        try:
            with held(limits, caller(name, bytes=40, pixels=40, requests=1)) as client_lease:
                client_lease.hold_bytes(size)
                client_lease.hold_pixels(pixels)
        except ServiceError:
            pass
    assert len(limits) == 0
