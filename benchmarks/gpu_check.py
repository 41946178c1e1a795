"""What has never been measured here, in one run on a machine with an accelerator, without a network.

    benchmarks/gpu_check.sh [--device cuda] [--models resnet50,yolov8n] [--sizes 1,2,4,8,16,32,64]

The contract suite; every engine in every precision, its answers compared with the CPU's in float32, and images a second
over batch sizes; JPEGs over HTTP. Each in a process of its own: one that fails or hangs costs only itself. Writes
gpu_check.json and gpu_check.md into the folder `--out`. Ends with 1 when anything failed, with 2 without the device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.decoders.decoder import decode_into
from app.images.header import read_header
from backends import BackendUnavailableError, EngineRefusedError, Executable, choose
from backends.backend import Array, CompileOptions, Pixels
from models import PixelModel, open_model, parse_spec
from models.sample import IMAGES

ROOT = Path(__file__).resolve().parent.parent
# Largest difference from the CPU's float32, of the largest number in an output, from which an answer counts as wrong.
TOLERANCES = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.1}


def main() -> int:
    """Run everything, print and write it."""
    given = arguments()
    if given.case:
        engine, precision, name = given.case
        result = case(given, engine, precision, name)
        (given.out / "case.json").write_text(json.dumps(result))
        return 0
    try:
        choice = choose(given.device)
    except BackendUnavailableError as error:
        print(f"gpu_check: there is nothing to check: {error}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    backend, device = choice.backend, choice.devices[0]
    named = next(each.name for each in backend.devices() if each.id == device)
    report: dict[str, Any] = {
        "device": device,
        "name": named,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "tests": [],
        "engines": [],
        "http": [],
    }
    if not given.no_tests:
        for words in (
            ("tests/simulated/test_device_contract.py", "-k", f"here and {backend.name}"),
            ("tests/cpu/test_backends.py", "-k", f"{backend.name} or TestBackend"),
        ):
            report["tests"].append(suite(words, given.limit))
            _write(given.out, report)
    engines = given.engines.split(",") if given.engines else backend.facts.engines
    for name in given.models.split(","):
        for engine in engines:
            for precision in given.precisions.split(",") if given.precisions else backend.facts.precisions:
                row = in_child(given, engine, precision, name)
                report["engines"].append({"model": name, "engine": engine, "precision": precision, **row})
                print(_row(report["engines"][-1]), flush=True)
                _write(given.out, report)
    if not given.no_http:
        for name in given.models.split(","):
            report["http"].append(http(given, name))
            _write(given.out, report)
    _write(given.out, report)
    print(markdown(report))
    return 1 if failed(report) else 0


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="resnet50,yolov8n")
    parser.add_argument("--sizes", default="1,2,4,8,16,32,64", help="batch sizes")
    parser.add_argument("--engines", default="", help="default: all of the backend")
    parser.add_argument("--precisions", default="", help="default: all of the backend")
    parser.add_argument("--seconds", type=float, default=2, help="length of one measurement")
    parser.add_argument("--http-seconds", type=float, default=6)
    parser.add_argument("--concurrency", default="1,16,64,256")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that one part may take")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-http", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    parser.add_argument("--case", nargs=3, metavar=("ENGINE", "PRECISION", "MODEL"), help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.out = given.out.resolve()  # Parts run in the repository, wherever this was called.
    return given


def suite(words: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    """A part of the tests: what pytest says at its end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=1200", *words]
    code, text = _run(command, limit_s)
    lines = [line for line in text.splitlines() if line.strip()]
    # pytest ends with 5 when it has found no test: nothing was checked then.
    return {"what": " ".join(words), "passed": code == 0, "says": lines[-1] if lines else "", "tail": lines[-40:]}


def in_child(given: argparse.Namespace, engine: str, precision: str, name: str) -> dict[str, Any]:
    """`case` in a process of its own."""
    path = given.out / "case.json"
    path.unlink(missing_ok=True)
    options = ("--device", given.device, "--sizes", given.sizes, "--seconds", str(given.seconds), "--out", given.out)
    command = [sys.executable, "-m", "benchmarks.gpu_check", *map(str, options), "--case", engine, precision, name]
    code, text = _run(command, given.limit)
    if code or not path.exists():
        return {"failure": f"ended with {code}", "tail": text.splitlines()[-20:]}
    result: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return result


def case(given: argparse.Namespace, engine: str, precision: str, name: str) -> dict[str, Any]:
    """One engine in one precision: time to load, answers, images a second over batch sizes."""
    sizes = sorted({int(size) for size in given.sizes.split(",")})
    model = open_model(parse_spec(name, "sample"), Path())
    assert isinstance(model, PixelModel)
    pixels = sample_pixels(model, sizes[-1])
    few = [size for size in sizes if size <= 8] or sizes[:1]
    with torch.inference_mode():
        expected = [output.numpy() for output in model.network()(torch.from_numpy(pixels[: few[-1]]))]
    choice = choose(given.device)
    device = choice.devices[0]
    options = CompileOptions(cache_dir=given.out / "cache")
    before_s = time.perf_counter()
    try:
        executable, report = choice.backend.load(model.network(), device, engine, precision, sizes, options=options)
    except EngineRefusedError as error:
        return {"refusal": str(error)}
    load_s = time.perf_counter() - before_s
    compared = [compare(executable.run(pixels[:size]), [each[:size] for each in expected]) for size in few]
    allocated = choice.backend.memory(device).allocated
    rates = {str(size): round(images_per_s(executable, pixels[:size], given.seconds), 1) for size in sizes}
    latencies = latency_ms(executable, pixels[: sizes[0]], given.seconds)
    result = {
        "became": [report.engine, report.precision],
        "load_s": round(load_s, 1),
        "largest_relative_error": max(error for error, _ in compared),
        "integers_equal": min(equal for _, equal in compared),
        "allocated_mib": round(allocated / 2**20),
        "images_per_s": rates,
        "p50_ms": latencies[0],
        "p99_ms": latencies[1],
        "operators": dict(report.operators),
    }
    executable.close()
    return result


def sample_pixels(model: PixelModel, count: int) -> Pixels:
    """The sample images as the network takes them, over and over."""
    files = sorted(IMAGES.glob("*.jpg"))
    pixels = torch.zeros((count, *model.input_shape), dtype=torch.uint8)
    for row, path in zip(pixels, [files[index % len(files)] for index in range(count)], strict=True):
        image = path.read_bytes()
        decode_into(model, image, read_header(image), row)
    taken: Pixels = pixels.numpy()
    return taken


def compare(ours: tuple[Array, ...], theirs: list[Array]) -> tuple[float, float]:
    """Largest difference relative to an output's largest number; share of equal integers."""
    error, equal = 0.0, 1.0
    for mine, other in zip(ours, theirs, strict=True):
        if np.issubdtype(other.dtype, np.floating):
            difference = np.abs(mine.astype(np.float64) - other)
            largest = max(float(np.abs(other).max()), 1e-30)
            error = max(error, float(difference.max()) / largest) if np.isfinite(mine).all() else np.inf
        else:
            equal = min(equal, float((mine == other).mean()))
    return error, equal


def images_per_s(executable: Executable, pixels: Pixels, seconds: float) -> float:
    """From memory of the executable's own, as many batches under way as it allows."""
    buffers = [executable.buffer(len(pixels)) for _ in range(executable.depth)]
    for buffer in buffers:
        buffer[:] = pixels
    under_way: deque[Any] = deque()
    begun, done = 0, 0
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        under_way.append(executable.start(buffers[begun % len(buffers)]))
        begun += 1
        if len(under_way) == executable.depth:
            under_way.popleft().outputs()
            done += 1
    while under_way:
        under_way.popleft().outputs()
        done += 1
    return done * len(pixels) / (time.perf_counter() - started_s)


def latency_ms(executable: Executable, pixels: Pixels, seconds: float) -> tuple[float, float]:
    """p50 and p99 of one batch at a time."""
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(times) < 2:
        started_s = time.perf_counter()
        executable.run(pixels)
        times.append((time.perf_counter() - started_s) * 1e3)
    return round(statistics.median(times), 2), round(statistics.quantiles(times, n=100)[98], 2)


def http(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """JPEGs over HTTP through benchmarks.http_load, with the engine and precision that `auto` chooses."""
    path = given.out / "http.json"
    path.unlink(missing_ok=True)
    options = {
        "--model": name,
        "--device": given.device,
        "--batch-sizes": given.sizes,
        "--concurrency": given.concurrency,
        "--seconds": str(given.http_seconds),
        "--rounds": "1",
        "--json": str(path),
    }
    words = [word for pair in options.items() for word in pair]
    code, text = _run([sys.executable, "-m", "benchmarks.http_load", "--no-naive", *words], given.limit)
    if code or not path.exists():
        return {"model": name, "failure": f"ended with {code}", "tail": text.splitlines()[-20:]}
    result: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return result


def wrong(row: dict[str, Any]) -> bool:
    """Whether an engine's answers are not the CPU's. An engine may have stepped up to another precision."""
    return "became" in row and not row["largest_relative_error"] <= TOLERANCES.get(row["became"][1], 0.1)


def failed(report: dict[str, Any]) -> bool:
    """A refusal is an answer; a failure, a wrong answer or a failed test is not."""
    return (
        any(not tests["passed"] for tests in report["tests"])
        or any("failure" in row or wrong(row) for row in report["engines"])
        or any("failure" in row or any(one["errors"] for one in row["service"].values()) for row in report["http"])
    )


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = [f"# {report['device']}: {report['name']}, torch {report['torch']}, {report['date']}", ""]
    lines += [
        f"- {'passed' if each['passed'] else 'FAILED'}: `{each['what']}`: {each['says']}" for each in report["tests"]
    ]
    sizes = sorted({int(size) for row in report["engines"] for size in row.get("images_per_s", {})})
    head = ["model", "engine", "precision", "load s", "rel. error", "p50 ms", *(f"{size}/s" for size in sizes)]
    lines += ["", "Images a second by batch size:", "", _cells(head), _cells(["---"] * len(head))]
    for row in report["engines"]:
        lines.append(_row(row, sizes))
    for row in report["http"]:
        lines += ["", f"{row['model']} over HTTP: {row.get('failure') or row['engine'] + ' ' + row['precision']}"]
        for connections, one in row.get("service", {}).items():
            lines.append(f"- {connections} connections: {one}")
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any], sizes: list[int] | None = None) -> str:
    first = [row["model"], row["engine"], row["precision"]]
    if "became" not in row:
        return _cells([*first, f"refused: {row['refusal']}" if "refusal" in row else f"FAILED: {row['failure']}"])
    rates = row["images_per_s"]
    error = f"{'WRONG ' if wrong(row) else ''}{row['largest_relative_error']:.1e}"
    shown = [rates.get(str(size), "") for size in sizes or map(int, rates)]
    return _cells([*first, row["load_s"], error, row["p50_ms"], *shown])


def _cells(values: list[Any]) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def _write(out: Path, report: dict[str, Any]) -> None:
    """After every part, so that what is measured stays whatever comes."""
    (out / "gpu_check.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "gpu_check.md").write_text(markdown(report))


def _run(command: list[str], limit_s: float) -> tuple[int, str]:
    """Exit status and what was printed; a part that takes too long ends with 124."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # A group of its own, which ends with all that it has started.
    )
    try:
        text, _ = process.communicate(timeout=limit_s)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        return 124, text


if __name__ == "__main__":
    raise SystemExit(main())
