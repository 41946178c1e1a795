"""What a service does where there is no room: in a queue that is too small for a request, on a disk, in memory."""

from __future__ import annotations

import httpx
import pytest

from tests.support.images import GREY
from tests.support.load import WAIT_S
from tests.support.null_service import PREDICT, assert_nothing_left

pytestmark = pytest.mark.paired


def files(count):
    return [("file", (f"{number}.jpg", GREY)) for number in range(count)]


def test_more_images_than_may_ever_wait_are_refused_for_good(serve):
    with serve("", "--queue-size", "8") as service:
        fits = httpx.post(service.url + PREDICT, files=files(8), timeout=WAIT_S)
        assert fits.status_code == 200
        never = httpx.post(service.url + PREDICT, files=files(9), timeout=WAIT_S)
        assert (never.status_code, never.json()["code"]) == (400, "INVALID_REQUEST")
        assert "8 images" in never.json()["error"]
        assert "retry-after" not in never.headers
        assert_nothing_left(service)
