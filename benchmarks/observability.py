"""Measure what watching or keys cost: throughput with them as a share of that without.

Two services run on the device that computes nothing, which hides no cost, or on a real one (`--device cpu`);
the same load, turn and turn about in one run, the order changed every round. Watching on: metrics, scraped as
OpenMetrics once a second, and traces of one request in a hundred, sent to a sink; off: `benchmarks.uncounted`, no
traces, no scrapes.
Keys on: a file of a hundred keys with every limit, and one of them with each request; off: no file.

    python -m benchmarks.observability [--of keys] [--connections 32] [--seconds 5] [--rounds 6] [--json FILE]

Owns: the two services, the rounds, and the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from anychip_tools.benchmark.load import drive
from app.access import keys
from backends.host import core_count
from benchmarks import servers
from benchmarks.overhead import IMAGE_BYTES, measure_once, medians, noise_jpeg

AIM = 0.97
_SCRAPE_INTERVAL_S = 1.0
_KEYS = 100


def main() -> None:
    """Run the measurements and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--of", choices=("watching", "keys"), default="watching", help="what is on and off")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--device", default="null", help="what anychip serve takes; with sample weights unless null")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=6, help="how often each is measured; medians count")
    parser.add_argument(
        "--trace-ratio", type=float, default=0.01, help="share of requests that are traced; 0: no traces"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    report = measure(given)
    _print(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure rounds of both, in sequence; return the medians, and the median of the rounds' ratios."""
    image = noise_jpeg(IMAGE_BYTES)
    common = ("--weights", "random" if given.device == "null" else "sample", "--device", given.device)
    rounds: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with contextlib.ExitStack() as stack:
        options: dict[str, tuple[str, ...]] = {"off": (), "on": ()}
        modules = {"off": "app", "on": "app"}
        headers = {}
        if given.of == "keys":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options["on"], headers = _keys(folder)
        else:
            endpoint = stack.enter_context(_sink())
            traces = ("--trace-endpoint", endpoint)
            options["on"] = traces if given.trace_ratio else ()
            os.environ["OTEL_TRACES_SAMPLER_ARG"] = str(given.trace_ratio)
            modules["off"] = "benchmarks.uncounted"
        services = {
            kind: stack.enter_context(servers.service(given.model, *common, *more, module=modules[kind]))
            for kind, more in options.items()
        }
        requests = {
            "off": servers.service_request(given.model, image),
            "on": servers.service_request(given.model, image, headers),
        }
        for kind, server in services.items():
            drive(server.port, requests[kind], given.connections, 1.0)  # Warm-up.
        for number in range(given.rounds):
            for kind in ("off", "on") if number % 2 else ("on", "off"):
                server, watched = services[kind], kind == "on" and given.of == "watching"
                with _scraped(server.port) if watched else contextlib.nullcontext():
                    rounds[kind].append(measure_once(server, requests[kind], given.connections, given.seconds))
    pairs = list(zip(rounds["on"], rounds["off"], strict=True))
    return {
        **{
            name: getattr(given, name)
            for name in ("of", "model", "device", "connections", "seconds", "rounds", "trace_ratio")
        },
        "cores": core_count(),
        "date": time.strftime("%Y-%m-%d"),
        **{kind: medians(measured) for kind, measured in rounds.items()},
        "throughput_ratio": statistics.median(on["answers_per_s"] / off["answers_per_s"] for on, off in pairs),
        "throughput_ratios": [round(on["answers_per_s"] / off["answers_per_s"], 3) for on, off in pairs],
        "cpu_ratio": statistics.median(on["cpu_ms"] / off["cpu_ms"] for on, off in pairs),
    }


def _keys(folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the options and the headers of a service that requires a key, and knows a hundred."""
    file = folder / "keys.txt"
    for number in range(_KEYS):
        key = keys.add(file, f"client-{number}", "infer")
    limits = "requests=4096 images_per_s=1e6 bytes=4e9 pixels=4e9"
    file.write_text("".join(f"{line} {limits}\n" for line in file.read_text().splitlines()))
    return ("--api-keys-file", str(file)), {"Authorization": f"Bearer {key}"}


@contextlib.contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Scrape like Prometheus, more often."""
    done = threading.Event()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )

    def scrape() -> None:
        while not done.wait(_SCRAPE_INTERVAL_S):
            with urllib.request.urlopen(request, timeout=30) as answer:
                answer.read()

    thread = threading.Thread(target=scrape, name="scrapes")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _Sink(BaseHTTPRequestHandler):
    """Handler that takes traces and drops them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def _sink() -> Iterator[str]:
    """Serve a sink for traces; yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    thread = threading.Thread(target=server.serve_forever, name="sink")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['of']}: {report['model']} on {report['device']}, {report['connections']} connections, "
        f"{report['rounds']} rounds of {report['seconds']:g} s, {report['cores']} cores"
    )
    print(f"{'':5}{'answers/s':>11}{'p99 ms':>9}{'CPU ms a request':>18}")
    for kind in ("off", "on"):
        row = report[kind]
        print(f"{kind:5}{row['answers_per_s']:>11.0f}{row['p99_ms']:>9.2f}{row['cpu_ms']:>18.3f}")
    print(f"rounds: {' '.join(map(str, report['throughput_ratios']))}")
    print(f"on / off: answers {report['throughput_ratio']:.3f} (aim: >= {AIM}), CPU {report['cpu_ratio']:.3f}")


if __name__ == "__main__":
    main()
