"""Counter of the time for which the container's processor limit stopped the service; 0 without a control group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

_NAME = "anychip_cpu_throttled_seconds"
_ROOT = Path("/sys/fs/cgroup")
_TEXT = "Time that the container's processor limit held its processes up"


class Throttling(Collector):
    """Control group of this process, as a container sees it."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter."""
        family = CounterMetricFamily(_NAME, _TEXT)
        family.add_metric([], self._seconds())
        yield family

    def _seconds(self) -> float:
        # Version 2 counts in microseconds and for the group itself; version 1 in nanoseconds, below a folder.
        for file, field, unit in (("cpu.stat", "throttled_usec", 1e6), ("cpu/cpu.stat", "throttled_time", 1e9)):
            try:
                text = (_ROOT / file).read_text(encoding="ascii")
            except (OSError, ValueError):
                continue
            if found := re.search(rf"^{field} (\d+)$", text, re.MULTILINE):
                return int(found[1]) / unit
        return 0.0
