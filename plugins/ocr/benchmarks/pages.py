"""Pages a second of anychip and of RapidOCR in a plain handler, in alternate rounds, and memory over many pages.

    .venv-ocr/bin/python plugins/ocr/benchmarks/pages.py [--rounds 5] [--seconds 20] [--memory-pages 2000]

Both servers run all the time; the one without requests takes no processor time. The pages are those of the tests. If
other work runs, the processor time of a page tells more than pages a second.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MODEL = "ocr"


def pages() -> list[bytes]:
    """Encode the tests' pages as JPEG."""
    spec = importlib.util.spec_from_file_location("pages_of_tests", HERE.parent / "tests" / "pages.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = []
    for page in module.pages():
        stream = io.BytesIO()
        page.image.save(stream, "JPEG", quality=92)
        found.append(stream.getvalue())
    return found


def networks() -> Path:
    """Find PP-OCR's networks in RapidOCR's wheel."""
    spec = importlib.util.find_spec("rapidocr")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent / "models"


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def served(command: list[str], url: str, ready: str) -> Iterator[psutil.Process]:
    """Run a server until the context ends; yield its process once it answers."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        for _ in range(1800):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url + ready).status_code in (200, 405):
                    break
            if process.poll() is not None:
                sys.exit("a server did not start: see above")
            time.sleep(0.5)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def drive(url: str, bodies: list[bytes], connections: int, seconds: float, most: int = 1 << 60) -> tuple[int, float]:
    """Send pages; return the number answered and the seconds. Each connection sends its next page after the answer."""
    turn, lock, done = itertools.count(), threading.Lock(), [0]
    started_s = time.monotonic()

    def ask() -> None:
        with httpx.Client(timeout=300) as client:
            while time.monotonic() - started_s < seconds:
                with lock:
                    number = next(turn)
                if number >= most:
                    return
                body = bodies[number % len(bodies)]
                client.post(url, content=body, headers={"Content-Type": "image/jpeg"}).raise_for_status()
                with lock:
                    done[0] += 1

    threads = [threading.Thread(target=ask) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done[0], time.monotonic() - started_s


def memory_bytes(process: psutil.Process) -> int:
    """Return the memory of a service with its children; shared memory counts once (proportional set size)."""
    return sum(each.memory_full_info().pss for each in (process, *process.children(recursive=True)))


def used_s(process: psutil.Process) -> float:
    """Return the processor time of a service with its children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


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
    ours, theirs = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    serve = [sys.executable, "-m", "app", "serve", "--models", given.models, "--port", ours.rpartition(":")[2]]
    handler = [sys.executable, str(HERE / "rapidocr_server.py"), theirs.rpartition(":")[2]]
    report: dict[str, Any] = {"rounds": []}
    with (
        served([*serve, "--admin", "off", *given.options], ours, "/v2/health/ready") as service,
        served(handler, theirs, "/ocr") as other,
    ):
        routes = {"anychip": f"{ours}/v1/models/{MODEL}:predict", "rapidocr": f"{theirs}/ocr"}
        for route in routes.values():  # Slow first requests come before the rounds.
            drive(route, bodies, 2, 300, most=len(bodies))
        for _ in range(given.rounds):
            row = {}
            for (name, route), process in zip(routes.items(), (service, other), strict=True):
                before_s = used_s(process)
                count, taken_s = drive(route, bodies, given.connections, given.seconds)
                row[name] = round(count / taken_s, 3)
                row[f"{name}_processor_s"] = round((used_s(process) - before_s) / count, 3)  # For a page.
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
