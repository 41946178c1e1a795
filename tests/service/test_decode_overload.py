"""A real service whose decoders are asked for more than they can do: every request gets an answer, and one it may get.

What is answered, and when, is asserted in virtual time (tests/virtual/test_overload.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
from PIL import Image

from tests.support.images import JPEG, encoded
from tests.support.load import WAIT_S
from tests.support.null_service import PREDICT

PHOTO = encoded(Image.radial_gradient("L").resize((2000, 1500)).convert("RGB"), "JPEG")
HURRIED, URGENT = {"X-Timeout-Ms": "250"}, {"X-Timeout-Ms": "60000", "X-Priority": "50"}


async def test_a_crowd_is_answered_or_refused_and_what_matters_more_is_answered(serve):
    with serve("fail=999999999") as service:  # The device looks at its images, so that they are decoded.
        async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:

            async def ask(headers):
                return await client.post(PREDICT, content=PHOTO, headers={**JPEG, **headers})

            answers = await asyncio.gather(*[ask(HURRIED) for _ in range(90)], *[ask(URGENT) for _ in range(10)])
            statuses = Counter(answer.status_code for answer in answers[:90])
            assert set(statuses) <= {200, 429, 503, 504}
            assert [answer.status_code for answer in answers[90:]] == [200] * 10
            assert all("retry-after" in answer.headers for answer in answers if answer.status_code in (429, 503))
            assert (await ask({"X-Timeout-Ms": "60000"})).status_code == 200
