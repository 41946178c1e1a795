"""What runs in a server's loop asks app.clock: time that a test cannot put in its place decides nothing."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

from app.main import _told

APP = Path(__file__).resolve().parents[2] / "app"
PARTS = ("decoding", "fleet", "ingress", "scheduling", "serving")
REAL = {"serving/opening.py"}
"""Says in the log how long a child took."""


def test_the_loops_code_asks_no_other_clock():
    asks = {
        str(path.relative_to(APP))
        for part in PARTS
        for path in (APP / part).rglob("*.py")
        if re.search(r"(?<!`)\btime\.(monotonic|perf_counter|time)\(|from time import", path.read_text("utf-8"))
    }
    assert asks == REAL


async def test_a_start_whose_log_goes_into_a_file_says_every_five_seconds_how_far_it_is(caplog):
    with caplog.at_level(logging.INFO):
        async with _told(lambda: "1 of 2 models are loaded"):
            await asyncio.sleep(11)
    assert [record.message for record in caplog.records] == ["1 of 2 models are loaded"] * 2
