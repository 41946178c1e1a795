"""No test asserts what a real clock says: on a busy machine that says nothing about the product.

A test waits for a state with an `until` of tests/support (`load` in a loop, `work` in none). Deadlines are those of
`app.clock`. What is measured in seconds is marked `nightly`, or is in benchmarks/.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOCK = re.compile(
    r"\btime(it)?\.(monotonic|perf_counter|process_time|thread_time|time|timeit|repeat|default_timer)(_ns)?\b"
    r"|from time(it)? import (?!sleep$)|import time(it)? as|\.elapsed\b|ru_[us]time"
    r"|\b(cpu_times|os\.times|datetime\.(utc)?now)\(",
    re.MULTILINE,
)
VIRTUAL = re.compile(r"\bvirtual_|VirtualLoop|in virtual time")
LOOP = re.compile(r"loop(\(\))?\.time\(\)")
REAL = {
    "tests/cpu/test_models_on_demand.py": "is marked nightly",
    "tests/environments/cached.py": "compares ages of folders",
    "tests/service/test_chaos.py": "is marked nightly",
    "tests/suites/__main__.py": "prints how long suites take",
    "tests/support/liveness.py": "reports slow answers to tests that are marked nightly",
    "tests/support/loop_guard.py": "measures callbacks, as processor time",
    "tests/support/prometheus.py": "names the span of a query",
    "tests/unit/test_connection.py": "puts its loop's clock on",
    "tests/unit/test_opened.py": "makes a file a week old",
}
"""Files with a real clock, and why. A loop is virtual in tests/virtual, and in unit tests with `virtual_time`."""


def has_a_real_clock(text: str) -> bool:
    return bool(CLOCK.search(text) or (LOOP.search(text) and not VIRTUAL.search(text)))


def test_only_these_files_have_a_real_clock():
    files = [path for room in ("tests", "plugins") for path in (ROOT / room).rglob("*.py") if "tests" in path.parts]
    found = {str(path.relative_to(ROOT)) for path in files if has_a_real_clock(path.read_text(encoding="utf-8"))}
    assert found - {str(Path(__file__).relative_to(ROOT))} == REAL.keys()


@pytest.mark.parametrize("text", ["time.monotonic()", "time.time_ns()", "from time import monotonic", "loop.time()"])
def test_a_real_clock_is_found(text):
    assert has_a_real_clock(text)
    assert not has_a_real_clock("clock.monotonic() in virtual_time: loop.time()")
