"""The feeding benchmark: what wrk prints is read, and the calculator says cores."""

from __future__ import annotations

import pytest

from benchmarks import wrk
from benchmarks.feeding import needed

PRINTED = """Running 4s test @ http://127.0.0.1:8000/v1/models/resnet50:predict
  1 threads and 32 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    10.52ms    2.11ms  30.05ms   78.00%
  Latency Distribution
     50%  890.00us
     75%   12.00ms
     90%   13.00ms
     99%    1.20s
  4100 requests in 4.01s, 1.21MB read
Requests/sec:   1022.44
"""


def test_what_wrk_prints_is_read():
    assert wrk.read(PRINTED) == (4100, pytest.approx(4.01), pytest.approx(0.89), pytest.approx(1200))


@pytest.mark.parametrize(
    "printed",
    [
        PRINTED + "  Non-2xx or 3xx responses: 17\n",
        PRINTED + "  Socket errors: connect 0, read 3, write 0, timeout 0\n",
        PRINTED.replace("4100 requests", "0 requests"),
        "",
    ],
)
def test_a_run_with_other_answers_is_none(printed):
    with pytest.raises(RuntimeError, match="wrk says"):
        wrk.read(printed)


def test_the_calculator_says_how_many_cores_and_decoders():
    found = needed({"server_ms": 0.25, "decoder_ms": 1.4, "worker_ms": 0.1}, 2000)
    assert found["decoders"] == 4  # 2.8 cores, each busy to 0.85.
    assert found["servers"] == 1
    assert found["cores"] == pytest.approx((0.5 + 2.8 + 0.2) / 0.85)
    assert needed({"server_ms": 0.25, "decoder_ms": 1.4, "worker_ms": 0.1}, 5000)["servers"] == 2
    assert needed({"server_ms": 0.2}, 10)["decoders"] == 2
