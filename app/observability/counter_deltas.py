"""Counts of an ingress in another process, for the owner to add to its own: its counters never fall.

    its metrics ─► counter_deltas: what is not 0, which is 0 then ─► the owner's metrics

A killed process loses what it has counted since its last message, a tenth of a second at most.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec
from prometheus_client import Counter

from app.core import Count
from app.observability.metrics import CODES, LIFE, REJECTIONS, TABLE, Histogram, Metrics, Series
from app.observability.triton_statistics import ModelStatistics

Labels = tuple[str, ...]


class Counted(msgspec.Struct, array_like=True):
    """Increase by metric and labels: a counter's amount, or a histogram's counts and sum, with the last trace's id and
    measurement of each bucket. `statistics`: by model; `clients`: by name, requests and those refused.
    """

    counters: list[tuple[str, Labels, float]]
    series: list[tuple[str, Labels, list[Count], float, dict[int, tuple[dict[str, str], float]]]]
    statistics: dict[str, ModelStatistics]
    clients: dict[Annotated[str, msgspec.Meta(max_length=256)], tuple[Count, Count]]


def counter_deltas(metrics: Metrics, statistics: Mapping[str, ModelStatistics]) -> bytes:
    """Return the counts since the last call, and reset them."""
    counted = Counted([], [], {}, {})
    for name, row in TABLE.items():
        metric = getattr(metrics, name)
        if row.kind is Counter:
            children = metric._metrics.items() if row.labels else [((), metric)]
            for labels, child in children:
                if amount := child._value.get():
                    counted.counters.append((name, labels, amount))
                    child.reset()
        elif isinstance(metric, Histogram):
            for labels, series in metric.series.items():
                if any(series.counts):
                    seen = {bucket: (dict(each.labels), each.value) for bucket, each in series.exemplars.items()}
                    counted.series.append((name, labels, series.counts, series.sum, seen))
                    series.clear()
    for model, of in statistics.items():
        if of != _NOTHING:
            counted.statistics[model] = of.taken()
    counted.clients = metrics.clients.taken()
    return msgspec.msgpack.encode(counted)


_KNOWN: Mapping[str, Collection[str]] = {"code": CODES, "stage": LIFE, "reason": REJECTIONS}
_TRACE_LABELS = {"trace_id", "span_id"}


def add(
    content: bytes,
    metrics: Metrics,
    statistics: Mapping[str, ModelStatistics],
    known: Mapping[str, Collection[str]],
) -> None:
    """Add counts of another process. `known`: allowed values of labels, beside the fixed ones, by label.

    Raises ValueError, KeyError for other metrics or labels, or no number.
    """
    counted = msgspec.msgpack.decode(content, type=Counted)
    allowed = {**_KNOWN, **known}
    for name, labels in (*(each[:2] for each in counted.counters), *(each[:2] for each in counted.series)):
        row = TABLE[name]
        if not all(value in allowed[label] for label, value in zip(row.labels, labels, strict=True)):
            raise ValueError(f"{name} has no labels {labels}")
    for name, labels, amount in counted.counters:
        row = TABLE[name]
        if row.kind is not Counter or not math.isfinite(amount):
            raise ValueError(f"{name} is no counter, or {amount} no count")
        metric = getattr(metrics, name)
        (metric.labels(*labels) if row.labels else metric).inc(amount)
    for name, labels, counts, total, seen in counted.series:
        traces = [labels for labels, _ in seen.values()]
        if not all(each.keys() <= _TRACE_LABELS and max(map(len, each.values()), default=0) <= 64 for each in traces):
            raise ValueError(f"{name} has an exemplar that names no trace")
        if not math.isfinite(total) or not all(0 <= bucket < len(counts) for bucket in seen):
            raise ValueError(f"{name} has buckets that are not there")
        series: Series = getattr(metrics, name).labels(*labels)
        series.add(counts, total, seen)
    for model, more in counted.statistics.items():
        statistics[model].add(more)
    for client, (requests, refused) in counted.clients.items():
        metrics.clients.count(client, refused=refused, requests=requests)


_NOTHING = ModelStatistics()
