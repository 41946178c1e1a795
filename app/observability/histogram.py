"""Histograms that cost little to observe: prometheus_client's, without its locks and its walk over the buckets.

Owns: counting into buckets, and their form for a scrape. One thread observes (the event loop's), another may read: it
sees every number that was there when it began, and some that came meanwhile. Must not know what is measured.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """Series of one combination of labels. `exemplars`: the last measurement of each bucket whose trace is known."""

    __slots__ = ("_bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: dict[int, Exemplar] = {}
        self.sum = 0.0

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count a measurement; `exemplar` labels it."""
        bucket = bisect_left(self._bounds, amount)
        self.counts[bucket] += 1
        self.sum += amount
        if exemplar is not None:
            self.exemplars[bucket] = Exemplar(exemplar, amount, time.time())

    def add(self, counts: Sequence[int], total: float, seen: Mapping[int, tuple[dict[str, str], float]]) -> None:
        """Add the counts of a series with the same bounds. Raises ValueError for other bounds."""
        self.counts = [own + more for own, more in zip(self.counts, counts, strict=True)]
        self.sum += total
        for bucket, (labels, amount) in seen.items():
            self.exemplars[bucket] = Exemplar(labels, amount, time.time())

    def clear(self) -> None:
        """Reset all counts to zero."""
        self.counts, self.sum, self.exemplars = [0] * len(self.counts), 0.0, {}


class Histogram(Collector):
    """Registered family of series; used as prometheus_client's is."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """Register an empty family. `buckets`: upper bounds, ascending, without infinity."""
        if list(buckets) != sorted(set(buckets)) or not buckets:
            raise ValueError("buckets ascend")
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(float(bound) for bound in buckets)
        self._texts = [str(floatToGoString(bound)) for bound in (*self._bounds, inf)]  # type: ignore[no-untyped-call]
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """Return the series of these labels."""
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {', '.join(self._labels)}")
        return self._series.setdefault(values, Series(self._bounds))

    def series(self) -> ItemsView[tuple[str, ...], Series]:
        """Return all series, by labels."""
        return self._series.items()

    def describe(self) -> list[HistogramMetricFamily]:
        """Return the family, empty."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family as it is now."""
        [family] = self.describe()
        for labels, series in [*self._series.items()]:
            total = series.sum  # Before the counts: a sum without its measurement is worse than the reverse.
            sofar = 0
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for number, (text, count) in enumerate(zip(self._texts, [*series.counts], strict=True)):
                sofar += count
                exemplar = series.exemplars.get(number)
                buckets.append((text, sofar) if exemplar is None else (text, sofar, exemplar))
            family.add_metric(labels, buckets, total)
        yield family
