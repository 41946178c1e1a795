"""Measure how fast images reach a device that takes no time, and the work of each process for one image.

`anychip serve --device null` answers JPEGs that it decodes (`decoding`: the null device reads its images)
and JPEGs that nobody reads (`nothing`), beside the least that a FastAPI handler can do (`plain`) and, if a Python
with mosec is named, mosec with the same decoding (`mosec decoding`), and without decoding in one stage, which
does nothing else, and in two stages, the first handing bodies on like pixels (`mosec nothing`, `mosec two
stages`), turn and turn about in one run.
Decoding alone, without a server, is the limit: as many processes as there are cores do nothing else.

    python -m benchmarks.feeding [--connections 1,8,32] [--seconds 4] [--rounds 3] [--json FILE]
    python -m venv /tmp/mosec && /tmp/mosec/bin/pip install mosec       # the same version of Python as here
    python -m benchmarks.feeding --mosec /tmp/mosec/bin/python
    taskset -c 0 python -m benchmarks.feeding                           # on one core
    python -m benchmarks.feeding --ingresses 0,1                        # as the services' setting of that name
    python -m benchmarks.feeding --decoders 2,3,4 --workers 1,2,4,8     # the curves
    python -m benchmarks.feeding --json FILE --images-per-s 2450        # which cores that takes, by FILE's figures

Owns: rounds, figures by process, the limit, the curves and the calculator. Compare CPU times: unlike rates they
hardly depend on other work of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from anychip_tools.benchmark.load import drive
from app.decoder.decoder import decode_into
from app.images.header import read_header
from backends.host import core_count
from benchmarks import servers, wrk
from benchmarks.overhead import IMAGE_BYTES, LOOKS, noise_jpeg
from models import PixelModel, open_model, parse_spec

MODEL = "resnet50"
SERVICE = ("--weights", "random", "--device", "null")
PATHS = {"plain": "/predict"}
MOSEC = {"mosec nothing": "one", "mosec two stages": "two", "mosec decoding": "decode"}
"""Kinds of benchmarks.mosec_server by the name of their measurement: without decoding in one and in two stages."""
FULL = 0.85
"""Utilization of a process above which its queue grows: at 0.85 a queue is already several images long."""
DECODE_BESIDE_MS = 0.30  # Aim for all processes, for one JPEG, beside its decoding.


def main() -> None:
    """Run the measurements and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=4, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured; the median counts")
    parser.add_argument("--mosec", type=Path, help="a Python with mosec, of the same version as this one")
    parser.add_argument("--decoders", default="", help="measure the decoding service with so many, too: 2,3,4")
    parser.add_argument("--workers", default="", help="measure the service with so many workers, too: 1,2,4,8")
    parser.add_argument("--ingresses", help="what the services are told, e.g. 0,1: one service each")
    parser.add_argument("--images-per-s", type=float, help="say which cores this takes; measures nothing where FILE is")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    if given.images_per_s and given.json and given.json.exists():
        report = json.loads(given.json.read_text())
    else:
        report = measure(given)
        print_report(report)
        if given.json:
            given.json.write_text(json.dumps(report, indent=2) + "\n")
    if given.images_per_s:
        print_needed(report, given.images_per_s)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; return medians over the rounds."""
    image = noise_jpeg(IMAGE_BYTES)
    connections = [int(each) for each in given.connections.split(",")]
    rounds: dict[str, dict[int, list[dict[str, Any]]]] = {}
    limits = []
    with contextlib.ExitStack() as stack:
        running = {}
        for number, service in enumerate(service_options(given)):
            told = f", {service[-1]}" if number else ""
            running[f"nothing{told}"] = stack.enter_context(servers.service(MODEL, *service))
            running[f"decoding{told}"] = stack.enter_context(servers.service(MODEL, *service, environment=LOOKS))
        running["plain"] = stack.enter_context(servers.plain())
        if given.mosec:
            for name, kind in MOSEC.items():
                command = [str(given.mosec), "-m", "benchmarks.mosec_server", kind, str(core_count()), "--port"]
                running[name] = stack.enter_context(servers.other(command))
        for name, server in running.items():
            measure_once(name, server, image, 8, 1)  # Warm-up.
        for _ in range(given.rounds):
            limits.append(only_decoding(image, given.seconds))
            for number in connections:
                for name, server in running.items():
                    figures = measure_once(name, server, image, number, given.seconds)
                    rounds.setdefault(name, {}).setdefault(number, []).append(figures)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": core_count(),
        "ingresses": given.ingresses,
        "image_bytes": len(image),
        "generator": "wrk" if wrk.installed() else "anychip_tools.benchmark.load",
        "seconds": given.seconds,
        "rounds": given.rounds,
        "only_decoding": medians(limits),
        "load": {
            name: {str(number): medians(each) for number, each in by_number.items()}
            for name, by_number in rounds.items()
        },
    }
    for curve, values in (("decoders", given.decoders), ("workers", given.workers)):
        report[curve] = {
            value: medians(curve_point(curve, value, image, given)) for value in values.split(",") if values
        }
    return report


def service_options(given: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the options of each `anychip serve`, by number of ingresses; others are compared with the first."""
    return [(*SERVICE, "--ingresses", each) for each in given.ingresses.split(",")] if given.ingresses else [SERVICE]


def curve_point(curve: str, value: str, image: bytes, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rounds of one service with so many decoders, or so many workers."""
    options: tuple[str, ...] = ("--decoders", value)
    environment = LOOKS
    if curve == "workers":
        options, environment = (), {"ANYCHIP_NULL": f"devices={value}"}
    with servers.service(MODEL, *service_options(given)[0], *options, environment=environment) as server:
        measure_once(curve, server, image, 8, 1)
        return [measure_once(curve, server, image, 32, given.seconds) for _ in range(given.rounds)]


def measure_once(name: str, server: servers.Server, image: bytes, connections: int, seconds: float) -> dict[str, Any]:
    """Return rate, latency, and CPU time an answer by role. Raises RuntimeError on anything but good answers."""
    path = "/inference" if name in MOSEC else PATHS.get(name, f"/v1/models/{MODEL}:predict")
    before = server.cpu_by_role()
    if wrk.installed():
        driven = wrk.drive(f"http://127.0.0.1:{server.port}{path}", image, connections, seconds)
        answers, taken_s, p50_ms, p99_ms = driven
    else:
        load = drive(server.port, servers.jpeg_request(path, image), connections, seconds)
        if load.errors or not load.latencies_s:
            raise RuntimeError(f"{name}: errors {load.errors}")
        answers, taken_s = len(load.latencies_s), load.seconds
        p50_ms, p99_ms = load.percentile_ms(50), load.percentile_ms(99)
    after = server.cpu_by_role()
    cpu = {role: (after[role] - before.get(role, 0.0)) / answers * 1e3 for role in after}
    return {
        "answers_per_s": answers / taken_s,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "cpu_ms": sum(cpu.values()),
        **{f"{role}_ms": each for role, each in cpu.items()},
    }


def only_decoding(image: bytes, seconds: float) -> dict[str, float]:
    """Return the images a second that one process a core decodes, and the CPU time of each image."""
    count = core_count()
    context = multiprocessing.get_context("spawn")
    with context.Pool(count) as pool:
        pool.map(_decode, [(image, 0.2)] * count, chunksize=1)
        done = pool.map(_decode, [(image, seconds)] * count, chunksize=1)
    return {
        "images_per_s": sum(images / taken_s for images, taken_s, _ in done),
        "cpu_ms": sum(cpu_s for _, _, cpu_s in done) / sum(images for images, _, _ in done) * 1e3,
    }


def _decode(work: tuple[bytes, float]) -> tuple[int, float, float]:
    image, seconds = work
    torch.set_num_threads(1)
    model = open_model(parse_spec(f"{MODEL}:random"), Path())
    assert isinstance(model, PixelModel)
    target = torch.empty(model.input_shape, dtype=torch.uint8)
    images, begun_s, cpu_s = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begun_s < seconds:
        decode_into(model, image, read_header(image), target)
        images += 1
    return images, time.perf_counter() - begun_s, time.process_time() - cpu_s


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Return each figure's median over the rounds."""
    return {name: round(statistics.median(figures[name] for figures in rounds), 3) for name in rounds[0]}


def needed(figures: Mapping[str, float], images_per_s: float) -> dict[str, float]:
    """Return the cores for so many images a second, by role, from CPU milliseconds an image (`server_ms`, …).

    `decoders` is their number; `servers` above 1 means that one server process is not enough.
    """
    busy = {role: figures.get(f"{role}_ms", 0.0) * images_per_s / 1e3 for role in ("server", "decoder", "worker")}
    return {
        "servers": math.ceil(busy["server"] / FULL),
        "decoders": max(2, math.ceil(busy["decoder"] / FULL)),
        "cores": sum(busy.values()) / FULL,
        **{f"{role}_cores": cores for role, cores in busy.items()},
    }


def print_needed(report: Mapping[str, Any], images_per_s: float) -> None:
    """Print the calculator's answer in sentences."""
    load = report["load"]["decoding"]
    found = needed(load[max(load, key=int)], images_per_s)
    parts = ", ".join(f"{role} {found[f'{role}_cores']:.1f}" for role in ("server", "decoder", "worker"))
    print(
        f"{images_per_s:g} images/s of {report['image_bytes']} bytes: {found['cores']:.1f} cores at {FULL:.0%} "
        f"({parts}), --decoders {found['decoders']:.0f}, {found['servers']:.0f} service(s)"
    )


def print_report(report: Mapping[str, Any]) -> None:
    """Print the table and the aims."""
    print(
        f"JPEG of {report['image_bytes']} bytes, {report['rounds']} rounds of {report['seconds']:g} s, "
        f"{report['cores']} cores, load from {report['generator']}"
    )
    rate, cpu_ms = report["only_decoding"]["images_per_s"], report["only_decoding"]["cpu_ms"]
    print(f"{report['cores']} processes that only decode: {rate:.0f} images/s, {cpu_ms:.3f} ms each")
    print(f"{'':16}{'c':>4}{'answers/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>8}   by process")
    for name, by_number in report["load"].items():
        for number, row in by_number.items():
            _print_row(name, number, row)
    for curve in ("decoders", "workers"):
        for value, row in report[curve].items():
            _print_row(f"{value} {curve}", "32", row)
    for line in aims(report):
        print(line)


def _print_row(name: str, number: str, row: Mapping[str, float]) -> None:
    roles = "  ".join(f"{role[:-3]} {row[role]:.3f}" for role in row if role not in KNOWN and row[role] >= 0.001)
    print(
        f"{name:16}{number:>4}{row['answers_per_s']:>11.0f}{row['p50_ms']:>9.2f}{row['p99_ms']:>9.2f}{row['cpu_ms']:>8.3f}"
        f"   {roles}"
    )


KNOWN = {"answers_per_s", "p50_ms", "p99_ms", "cpu_ms"}


def aims(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield each aim with its figure, if it was measured."""
    load, only = report["load"], report["only_decoding"]
    for name, number, aim in (("decoding", "32", 1.2), ("decoding", "8", 1.05), ("nothing", "32", 0.75)):
        if number in load[name] and f"mosec {name}" in load:
            ratio = load[name][number]["answers_per_s"] / load[f"mosec {name}"][number]["answers_per_s"]
            yield f"{name}, c={number}: {ratio:.2f} of mosec's (aim: >= {aim})"
    if "32" in load["decoding"]:
        row = load["decoding"]["32"]
        yield f"of what only decoding does: {row['answers_per_s'] / only['images_per_s']:.2f} (aim: >= 0.75)"
        beside = row["cpu_ms"] - only["cpu_ms"]
        yield f"CPU a JPEG beside its decoding: {beside:.3f} ms (aim: <= {DECODE_BESIDE_MS:.2f})"
    if "1" in load["nothing"]:
        yield f"one connection, nothing decoded: p50 {load['nothing']['1']['p50_ms']:.2f} ms (aim: <= 0.6)"
    workers = report["workers"]
    if {"1", "8"} <= workers.keys():
        yield f"CPU an image, 8 workers / 1: {workers['8']['cpu_ms'] / workers['1']['cpu_ms']:.2f} (aim: <= 1.2)"


if __name__ == "__main__":
    main()
