"""What runs in a server's loop asks app.clock: time that a test cannot put in its place decides nothing."""

from __future__ import annotations

import re
from pathlib import Path

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
