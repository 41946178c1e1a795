"""Measure useful answers a second under overload, of the service and of the naive handler.

Capacity is measured first, by a closed loop with the service's own long deadline. Then an open loop (Poisson arrivals)
asks for multiples of it, every request with a short deadline. Goodput counts the answers with status 200 that arrived
within the deadline, measured here, from the moment the request was due to be sent. A late answer is useless work.
The generator shares this machine's cores: if it was starved, the lateness of its requests shows it.

    python -m benchmarks.goodput [--model resnet50] [--factors 0.5,1,1.5,2,3] [--seconds 8] [--json FILE]
    python -m benchmarks.goodput --device null --null delay_ms=4,image_delay_ms=1

Owns: the load factors, the definition of good, the table and the two aims.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from anychip_tools.benchmark.load import (
    OpenLoad,
    allow_many_connections,
    drive,
    drive_open,
    percentile,
    poisson_arrivals,
)
from backends.host import core_count
from benchmarks import servers
from models import open_model, parse_spec

AIM = 0.95
_NAMED_STATUSES = ("429", "503", "504")


def main() -> None:
    """Run the measurements and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", default="sample")
    parser.add_argument("--device", default="auto", help="null leaves the naive handler out")
    parser.add_argument("--null", help="what the null device does, e.g. delay_ms=4,image_delay_ms=1")
    parser.add_argument("--image", type=Path, help="a JPEG (default: a sample image)")
    parser.add_argument("--factors", default="0.5,1,1.5,2,3", help="loads, as multiples of the capacity")
    parser.add_argument("--seconds", type=float, default=8, help="how long requests are sent at each load")
    parser.add_argument("--capacity-seconds", type=float, default=5, help="how long the capacity is measured")
    parser.add_argument("--connections", type=int, default=32, help="connections of the closed loop that measures it")
    parser.add_argument("--timeout-ms", type=float, default=250, help="the deadline of every request")
    parser.add_argument("--seed", type=int, default=0, help="of the arrival times")
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    allow_many_connections()
    report = measure(given)
    _print(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Load the service, then the naive handler; neither runs while the other is measured."""
    image = given.image.read_bytes() if given.image else servers.sample_image()
    report: dict[str, Any] = {
        "model": given.model,
        "weights": given.weights,
        "device": given.device,
        "null": given.null,
        "image_bytes": len(image),
        "timeout_ms": given.timeout_ms,
        "seconds": given.seconds,
        "seed": given.seed,
        "cores": core_count(),
        "date": time.strftime("%Y-%m-%d"),
        "service": _measure_service(given, image),
    }
    task = open_model(parse_spec(given.model, given.weights), Path()).task
    if not given.no_naive and given.device != "null" and task == "classify":
        report["naive"] = _measure_naive(given, image)
    return report


def _measure_service(given: argparse.Namespace, image: bytes) -> dict[str, Any]:
    options = ["--weights", given.weights, "--device", given.device]
    if given.null:
        options += ["--null", given.null]
    patient = servers.service_request(given.model, image)
    hurried = servers.service_request(given.model, image, {"X-Timeout-Ms": f"{given.timeout_ms:g}"})
    with servers.service(given.model, *options) as server:
        capacity = _capacity(server, patient, given)
        rows = [_load(server, hurried, factor, capacity, given) for factor in _factors(given)]
    return {"capacity_per_s": round(capacity, 1), "loads": _of_best(rows)}


def _measure_naive(given: argparse.Namespace, image: bytes) -> dict[str, Any]:
    request = servers.form_request("file", image)

    @contextmanager
    def fresh() -> Iterator[servers.Server]:
        # One server for each load: it goes on computing abandoned requests, into the next measurement.
        with servers.naive(given.model, given.weights) as server:
            drive(server.port, request, 2, 0.5)
            yield server

    with fresh() as server:
        capacity = _capacity(server, request, given)
    rows = []
    for factor in _factors(given):
        started: AbstractContextManager[servers.Server] = fresh()
        with started as server:
            rows.append(_load(server, request, factor, capacity, given))
    return {"capacity_per_s": round(capacity, 1), "loads": _of_best(rows)}


def _factors(given: argparse.Namespace) -> list[float]:
    return [float(part) for part in given.factors.split(",")]


def _capacity(server: servers.Server, request: bytes, given: argparse.Namespace) -> float:
    drive(server.port, request, given.connections, 1)  # Warm-up: first pages of the arena, first connections.
    load = drive(server.port, request, given.connections, given.capacity_seconds)
    if load.errors or not load.latencies_s:
        raise RuntimeError(f"the capacity cannot be measured: {len(load.latencies_s)} answers, errors {load.errors}")
    return load.answers_per_s


def _load(
    server: servers.Server, request: bytes, factor: float, capacity: float, given: argparse.Namespace
) -> dict[str, Any]:
    arrivals = poisson_arrivals(factor * capacity, given.seconds, given.seed)
    generator_s = time.process_time()
    load = drive_open(
        server.port, request, arrivals, seconds=given.seconds, timeout_s=given.timeout_ms / 1e3, linger_s=3
    )
    generator_s = time.process_time() - generator_s
    return {"factor": factor, **summary(load), "generator_cores": round(generator_s / given.seconds, 2)}


def summary(load: OpenLoad) -> dict[str, Any]:
    """Return the figures of one load; the results of its requests add up to `sent`."""
    latencies_s = [answer.latency_s for answer in load.accepted]
    in_time = load.in_time
    return {
        "offered_per_s": round(load.sent / load.seconds, 1),
        "sent": load.sent,
        "goodput_per_s": round(load.goodput_per_s, 1),
        "in_time": in_time,
        "late": len(load.accepted) - in_time,
        **{status: load.refused[status] for status in _NAMED_STATUSES},
        "other": sum(count for status, count in load.refused.items() if status not in _NAMED_STATUSES),
        "connection_errors": load.connection_errors,
        "unanswered": load.unanswered,
        "p50_ms": _milliseconds(latencies_s, 50),
        "p99_ms": _milliseconds(latencies_s, 99),
        "lateness_p99_ms": _milliseconds(load.lateness_s, 99),
    }


def _milliseconds(values_s: list[float], percent: float) -> float | None:
    return round(percentile(values_s, percent) * 1e3, 2) if values_s else None


def _of_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    best = max(row["goodput_per_s"] for row in rows)
    return [{**row, "of_best": round(row["goodput_per_s"] / best, 3) if best else None} for row in rows]


_COLUMNS = {
    "factor": "load",
    "offered_per_s": "offered/s",
    "sent": "sent",
    "goodput_per_s": "goodput/s",
    "of_best": "of best",
    "in_time": "in time",
    "late": "late",
    "429": "429",
    "503": "503",
    "504": "504",
    "other": "other",
    "connection_errors": "broken",
    "unanswered": "no answer",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "lateness_p99_ms": "sent late p99 ms",
    "generator_cores": "generator cores",
}


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['model']} ({report['weights']}) on {report['device']} {report['null'] or ''}, JPEG of "
        f"{report['image_bytes']} bytes, deadline {report['timeout_ms']:g} ms, {report['cores']} cores"
    )
    for kind in ("service", "naive"):
        if kind not in report:
            continue
        print(f"\n{kind}: capacity {report[kind]['capacity_per_s']} answers/s (closed loop)")
        print("  ".join(f"{title:>7}" for title in _COLUMNS.values()))
        for row in report[kind]["loads"]:
            cells = ("-" if row[name] is None else str(row[name]) for name in _COLUMNS)
            print(
                "  ".join(
                    f"{cell:>{max(7, len(_title))}}" for cell, _title in zip(cells, _COLUMNS.values(), strict=True)
                )
            )
    print()
    for line in aims(report):
        print(line)


def aims(report: dict[str, Any]) -> Iterator[str]:
    """Yield the two aims of the scheduling, as ratios."""
    rows = report["service"]["loads"]
    for row in rows:
        if row["factor"] in (2, 3):
            print_ratio = "-" if row["of_best"] is None else f"{row['of_best']:.2f}"
            yield f"goodput at {row['factor']:g} times the capacity / best goodput: {print_ratio} (aim: >= {AIM})"
    p99s = [row["p99_ms"] for row in rows if row["p99_ms"] is not None]
    if p99s:
        worst, middle = max(p99s), statistics.median(p99s)
        deadline = report["timeout_ms"]
        yield (
            f"p99 of accepted answers / deadline: {worst / deadline:.2f} at the worst load, "
            f"{middle / deadline:.2f} at the median one (aim: <= 1)"
        )


if __name__ == "__main__":
    main()
