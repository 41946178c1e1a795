"""What an ingress in another process has counted, for the owner to add to its own: counters there never fall.

    its metrics ─► gained: what is not 0, which is 0 then ─► the owner's metrics

Owns: that form. Must not know how it travels, nor what is counted. A process that is killed takes with it what it has
counted since it last told, a tenth of a second at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from prometheus_client import Counter

from app.observability.histogram import Histogram, Series
from app.observability.metrics import TABLE, Metrics
from app.observability.triton_statistics import ModelStatistics

Labels = tuple[str, ...]


class Counted(msgspec.Struct, array_like=True):
    """By metric and labels: of a counter how much more, of a histogram its counts, its sum, and of each bucket the last
    trace's id with what was measured. `statistics`: by model; `clients`: by name, requests and those refused.
    """

    counters: list[tuple[str, Labels, float]]
    series: list[tuple[str, Labels, list[int], float, dict[int, tuple[dict[str, str], float]]]]
    statistics: dict[str, ModelStatistics]
    clients: dict[str, tuple[int, int]]


def gained(metrics: Metrics, statistics: Mapping[str, ModelStatistics]) -> bytes:
    """What was counted since this was last called."""
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
            for labels, series in metric.series():
                if any(series.counts):
                    seen = {bucket: (dict(each.labels), each.value) for bucket, each in series.exemplars.items()}
                    counted.series.append((name, labels, series.counts, series.sum, seen))
                    series.clear()
    for model, of in statistics.items():
        if of != _NOTHING:
            counted.statistics[model] = of.taken()
    counted.clients = metrics.clients.taken()
    return msgspec.msgpack.encode(counted)


def add(content: bytes, metrics: Metrics, statistics: Mapping[str, ModelStatistics]) -> None:
    """Add what was gained elsewhere. Raises ValueError, KeyError for what is none of these metrics."""
    counted = msgspec.msgpack.decode(content, type=Counted)
    for name, labels, amount in counted.counters:
        row = TABLE[name]
        if row.kind is not Counter:
            raise ValueError(f"{name} is no counter")
        metric = getattr(metrics, name)
        (metric.labels(*labels) if row.labels else metric).inc(amount)
    for name, labels, counts, total, seen in counted.series:
        series: Series = getattr(metrics, name).labels(*labels)
        series.add(counts, total, seen)
    for model, more in counted.statistics.items():
        statistics[model].add(more)
    for client, (requests, refused) in counted.clients.items():
        metrics.clients.count(client, refused=refused, requests=requests)


_NOTHING = ModelStatistics()
