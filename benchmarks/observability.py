"""What watching costs: throughput with metrics, traces and scrapes, as a share of that without any of them.

Two services on the device that computes nothing, so that nothing hides the cost, or on a real one (`--device cpu`); the
same load, turn and turn about in one run, the order changed every round. On: metrics, scraped as OpenMetrics once a
second, and traces of one request in a hundred, sent to a sink. Off: `--metrics false`, no traces, no scrapes.

    python -m benchmarks.observability [--connections 32] [--seconds 5] [--rounds 6] [--trace-ratio 0.01] [--json FILE]

Owns: the two services, the rounds, and the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from app.tools.benchmark.load import drive
from backends.host import core_count
from benchmarks import servers
from benchmarks.overhead import IMAGE_BYTES, measure_once, medians, noise_jpeg

AIM = 0.97
_SCRAPE_INTERVAL_S = 1.0


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
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
    """Rounds of both, one after the other; the medians, and the median of the rounds' ratios."""
    image = noise_jpeg(IMAGE_BYTES)
    common = ("--weights", "random" if given.device == "null" else "sample", "--device", given.device)
    rounds: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with _sink() as endpoint, contextlib.ExitStack() as stack:
        traces = ("--trace-endpoint", endpoint, "--trace-ratio", str(given.trace_ratio)) if given.trace_ratio else ()
        services = {
            "off": stack.enter_context(servers.service(given.model, *common, "--metrics", "false")),
            "on": stack.enter_context(servers.service(given.model, *common, *traces)),
        }
        request = servers.service_request(given.model, image)
        for server in services.values():
            drive(server.port, request, given.connections, 1.0)  # Warm-up.
        for number in range(given.rounds):
            for kind in ("off", "on") if number % 2 else ("on", "off"):
                server = services[kind]
                with _scraped(server.port) if kind == "on" else contextlib.nullcontext():
                    rounds[kind].append(measure_once(server, request, given.connections, given.seconds))
    pairs = list(zip(rounds["on"], rounds["off"], strict=True))
    return {
        **{
            name: getattr(given, name)
            for name in ("model", "device", "connections", "seconds", "rounds", "trace_ratio")
        },
        "cores": core_count(),
        "date": time.strftime("%Y-%m-%d"),
        **{kind: medians(measured) for kind, measured in rounds.items()},
        "throughput_ratio": statistics.median(on["answers_per_s"] / off["answers_per_s"] for on, off in pairs),
        "throughput_ratios": [round(on["answers_per_s"] / off["answers_per_s"], 3) for on, off in pairs],
        "cpu_ratio": statistics.median(on["cpu_ms"] / off["cpu_ms"] for on, off in pairs),
    }


@contextlib.contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Scrape as Prometheus does, more often."""
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
    """Takes traces and forgets them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def _sink() -> Iterator[str]:
    """Where traces go; the address."""
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
        f"{report['model']} on {report['device']}, {report['connections']} connections, {report['rounds']} rounds of "
        f"{report['seconds']:g} s, {report['trace_ratio']:.0%} traced, {report['cores']} cores"
    )
    print(f"{'':5}{'answers/s':>11}{'p99 ms':>9}{'CPU ms a request':>18}")
    for kind in ("off", "on"):
        row = report[kind]
        print(f"{kind:5}{row['answers_per_s']:>11.0f}{row['p99_ms']:>9.2f}{row['cpu_ms']:>18.3f}")
    print(f"rounds: {' '.join(map(str, report['throughput_ratios']))}")
    print(f"on / off: answers {report['throughput_ratio']:.3f} (aim: >= {AIM}), CPU {report['cpu_ratio']:.3f}")


if __name__ == "__main__":
    main()
