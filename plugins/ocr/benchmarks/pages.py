"""Pages a second of anychip and of RapidOCR in a plain handler, in alternate rounds, and memory over many pages.

    .venv-ocr/bin/python plugins/ocr/benchmarks/pages.py [--rounds 5] [--seconds 20] [--memory-pages 2000]

Both servers run all the time; the one without requests takes no processor time. The pages are those of the tests. If
other work runs, the processor time of a page tells more than pages a second.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent / "tests")]

import pages as of_tests  # noqa: E402

from benchmarks import servers  # noqa: E402

MODEL = "ocr"


def pages() -> list[bytes]:
    """Encode the tests' pages as JPEG."""
    found = []
    for page in of_tests.pages():
        stream = io.BytesIO()
        page.image.save(stream, "JPEG", quality=92)
        found.append(stream.getvalue())
    return found


def networks() -> Path:
    """Find PP-OCR's networks in RapidOCR's wheel."""
    spec = find_spec("rapidocr")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent / "models"


def drive(url: str, bodies: list[bytes], connections: int, seconds: float, most: int = 1 << 60) -> tuple[int, float]:
    """Send pages; return the number answered and the seconds. Each connection sends its next page after the answer."""
    turns, started_s = itertools.count(), time.monotonic()

    def ask(_: int) -> int:
        answered = 0
        with httpx.Client(timeout=300) as client:
            while time.monotonic() - started_s < seconds and (number := next(turns)) < most:
                body = bodies[number % len(bodies)]
                client.post(url, content=body, headers={"Content-Type": "image/jpeg"}).raise_for_status()
                answered += 1
        return answered

    with ThreadPoolExecutor(connections) as threads:
        return sum(threads.map(ask, range(connections))), time.monotonic() - started_s


def memory_bytes(server: servers.Server) -> int:
    """Return the memory of a service with its children; shared memory counts once (proportional set size)."""
    processes = (server.process, *server.process.children(recursive=True))
    return sum(each.memory_full_info().pss for each in processes)


def used_s(server: servers.Server) -> float:
    """Return the processor time of a service with its children."""
    return sum(server.cpu_by_role().values())


def main() -> None:
    """Run and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--memory-pages", type=int, default=0)
    parser.add_argument("--models", default=f"{MODEL}=ppocr:{networks()}")
    parser.add_argument("options", nargs="*", help="more for anychip serve, after --")
    given = parser.parse_args()
    bodies = pages()
    handler = [sys.executable, str(HERE / "rapidocr_server.py")]
    report: dict[str, Any] = {"rounds": []}
    with (
        servers.service(given.models, "--admin", "off", *given.options) as service,
        servers.other(handler, "/openapi.json") as other,
    ):
        here = "http://127.0.0.1"
        routes = {"anychip": f"{here}:{service.port}/v1/models/{MODEL}:predict", "rapidocr": f"{here}:{other.port}/ocr"}
        for route in routes.values():  # Slow first requests come before the rounds.
            drive(route, bodies, 2, 300, most=len(bodies))
        for _ in range(given.rounds):
            row = {}
            for (name, route), server in zip(routes.items(), (service, other), strict=True):
                before_s = used_s(server)
                count, taken_s = drive(route, bodies, given.connections, given.seconds)
                row[name] = round(count / taken_s, 3)
                row[f"{name}_processor_s"] = round((used_s(server) - before_s) / count, 3)  # For a page.
            report["rounds"].append(row)
            print(row, flush=True)
        for name, above, below in (
            ("ratio", "anychip", "rapidocr"),
            ("ratio_of_processor_time", "rapidocr_processor_s", "anychip_processor_s"),
        ):
            ratios = [each[above] / each[below] for each in report["rounds"]]
            report[name] = round(statistics.median(ratios), 2) if ratios else None
        if given.memory_pages:
            held = []
            for _ in range(4):
                drive(routes["anychip"], bodies, given.connections, 1e9, most=given.memory_pages // 4)
                held.append(round(memory_bytes(service) / 2**20))
            report["memory_mib"] = held
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
