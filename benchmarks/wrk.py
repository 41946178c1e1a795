"""Load from `wrk`, which takes a fifth of the processor time of a generator in Python from the server's cores.

Owns: the script it reads and the figures it prints. Used if it is installed (Debian's package `wrk`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

_SCRIPT = """
local file = io.open("{body}", "rb")
wrk.method, wrk.body = "POST", file:read("*all")
wrk.headers["Content-Type"] = "image/jpeg"
file:close()
"""
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


class Driven(NamedTuple):
    """Good answers, the seconds they took together, and latencies in milliseconds."""

    answers: int
    seconds: float
    p50_ms: float
    p99_ms: float


def installed() -> bool:
    """Return True if wrk is installed."""
    return shutil.which("wrk") is not None


def drive(url: str, image: bytes, connections: int, seconds: float) -> Driven:
    """Post a JPEG again and again. Raises RuntimeError on any answer but 200."""
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder, "image.jpg"), Path(folder, "post.lua")
        body.write_bytes(image)
        script.write_text(_SCRIPT.format(body=body))
        options = ("-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency", "-s", str(script))
        return read(subprocess.run(["wrk", *options, url], capture_output=True, text=True, check=True).stdout)


def read(printed: str) -> Driven:
    """Parse wrk's output. Raises RuntimeError on any answer but 200."""
    wrong = re.search(r"Non-2xx.*|Socket errors.*", printed)
    total = re.search(r"(\d+) requests in ([\d.]+)(us|ms|s|m)", printed)
    if wrong or not total or total[1] == "0":
        raise RuntimeError(f"wrk says: {wrong[0] if wrong else printed}")
    seconds = float(total[2]) * _UNITS_MS[total[3]] / 1e3
    return Driven(int(total[1]), seconds, _percentile(printed, 50), _percentile(printed, 99))


def _percentile(printed: str, percent: int) -> float:
    found = re.search(rf"^\s+{percent}%\s+([\d.]+)(us|ms|s|m)$", printed, re.MULTILINE)
    return float(found[1]) * _UNITS_MS[found[2]] if found else float("nan")
