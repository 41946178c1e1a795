"""Measure how much of this machine's computing rate is left behind HTTP.

One run interleaves, over rounds: the in-process ceiling (decode + preprocess + engine, no HTTP), the service under
raw JPEGs at several concurrencies, and the naive handler. All of it shares this machine's cores, the generator too.

    python -m benchmarks.http_load [--model resnet50] [--seconds 6] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from anychip_tools.benchmark.load import ClosedLoad, drive
from app.config import Settings
from app.config.values import sizes_of
from app.decoder.decoder import decode_into
from app.images.header import Header, read_header
from app.precision.gate import compile_options
from app.precision.probes import Calibration
from backends import choose
from backends.contract.backend import LoadedNetwork
from backends.host import core_count
from benchmarks import servers
from models import Model, Options, open_model, parse_spec


def main() -> None:
    """Run the measurements and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", default="sample")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-sizes", default="1,2,4,8")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--image", type=Path, help="a JPEG (default: a sample image)")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=6, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured; the median counts")
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    settings = Settings(
        weights=given.weights,
        device=given.device,
        batch_sizes=given.batch_sizes,
        engine=given.engine,
        precision=given.precision,
    )
    image = given.image.read_bytes() if given.image else servers.sample_image()
    concurrencies = [int(part) for part in given.concurrency.split(",")]
    report = measure(
        given.model,
        settings,
        image,
        concurrencies=concurrencies,
        seconds=given.seconds,
        rounds=given.rounds,
        naive=not given.no_naive,
    )
    _print(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(
    name: str,
    settings: Settings,
    image: bytes,
    *,
    concurrencies: list[int],
    seconds: float,
    rounds: int,
    naive: bool,
) -> dict[str, Any]:
    """Measure rounds of ceiling, service and naive handler, in sequence; return medians over the rounds."""
    model = open_model(parse_spec(name, settings.weights), settings.weights_dir)
    header = read_header(image)
    naive = naive and model.task == "classify"
    ceilings: list[float] = []
    parts_ms: list[float] = []
    served: dict[int, list[ClosedLoad]] = {connections: [] for connections in concurrencies}
    naively: dict[int, list[ClosedLoad]] = {connections: [] for connections in concurrencies}
    torch.set_num_threads(1)
    with Ceiling(model, settings) as ceiling, contextlib.ExitStack() as stack:
        options = ("--weights", settings.weights, "--engine", settings.engine, "--precision", settings.precision)
        options += ("--device", settings.device, "--batch-sizes", ",".join(map(str, sizes_of(settings.batch_sizes))))
        port = stack.enter_context(servers.service(name, *options)).port
        naive_port = stack.enter_context(servers.naive(name, settings.weights)).port if naive else 0
        raw = servers.service_request(name, image)
        form = servers.form_request("file", image)
        drive(port, raw, 8, 1)  # Warm-up: first pages of the arena, first connections.
        for _ in range(rounds):
            ceilings.append(ceiling.images_per_s(image, header, seconds))
            parts_ms.append(ceiling.one_image_ms(image, header))
            for connections in concurrencies:
                served[connections].append(drive(port, raw, connections, seconds))
                if naive:
                    naively[connections].append(drive(naive_port, form, connections, seconds))
        engine, precision = ceiling.engine, ceiling.precision
    ceiling_rate = statistics.median(ceilings)
    return {
        "model": name,
        "engine": engine,
        "precision": precision,
        "image": f"{header.width} x {header.height}, {len(image)} bytes",
        "cores": core_count(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "ceiling_images_per_s": round(ceiling_rate, 1),
        "parts_ms": round(statistics.median(parts_ms), 2),
        "service": {str(c): _summary(loads, ceiling_rate) for c, loads in served.items()},
        "naive": {str(c): _summary(loads, ceiling_rate) for c, loads in naively.items() if loads},
    }


def _summary(loads: list[ClosedLoad], ceiling: float) -> dict[str, Any]:
    rate = statistics.median(load.answers_per_s for load in loads)
    return {
        "answers_per_s": round(rate, 1),
        "of_ceiling": round(rate / ceiling, 3),
        "p50_ms": round(statistics.median(load.percentile_ms(50) for load in loads), 2),
        "p99_ms": round(statistics.median(load.percentile_ms(99) for load in loads), 2),
        "errors": sum(sum(load.errors.values()) for load in loads),
    }


def _print(report: dict[str, Any]) -> None:
    how = f"{report['engine']} {report['precision']}"
    print(f"{report['model']}, {how}, JPEG {report['image']}, {report['cores']} cores")
    print(f"in-process ceiling {report['ceiling_images_per_s']} images/s; parts of one image {report['parts_ms']} ms")
    print(f"{'':9}{'concurrency':>12}{'answers/s':>11}{'of ceiling':>12}{'p50 ms':>9}{'p99 ms':>9}{'errors':>8}")
    best = {}
    for kind in ("service", "naive"):
        best[kind] = max((row["answers_per_s"] for row in report[kind].values()), default=0)
        for connections, row in report[kind].items():
            print(
                f"{kind:9}{connections:>12}{row['answers_per_s']:>11}{row['of_ceiling']:>12.2f}"
                f"{row['p50_ms']:>9}{row['p99_ms']:>9}{row['errors']:>8}"
            )
    if best["naive"]:
        print(f"service / naive: {best['service'] / best['naive']:.1f}")
    if "1" in report["service"]:
        print(f"p50 at concurrency 1 / its parts: {report['service']['1']['p50_ms'] / report['parts_ms']:.2f}")


def loaded(model: Model, settings: Settings) -> LoadedNetwork:
    """Load the network on the engine of the settings, in this process; PyTorch keeps to one thread."""
    choice = choose(settings.device)
    calibration = Calibration(model, settings.calibrate) if settings.precision == "int8" else None
    network = choice.backend.load(
        model.network(),
        choice.devices[0],
        settings.engine,
        settings.precision,
        sizes_of(settings.batch_sizes),
        # The quantised network is kept where the service finds it: both run the same network.
        options=compile_options(model, None, calibration, settings.cache_dir.expanduser()),
    )
    torch.set_num_threads(1)
    return network


class Ceiling:
    """The same decoder, geometry and engine in this process: threads decode while one thread computes."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self._model = model
        self._batch = sizes_of(settings.batch_sizes)[-1]
        self._threads = settings.decoders or core_count()
        self._executable, report = loaded(model, settings)
        self.engine, self.precision = report.engine, report.precision

    def __enter__(self) -> Ceiling:
        return self

    def __exit__(self, *_: object) -> None:
        self._executable.close()

    def images_per_s(self, image: bytes, header: Header, seconds: float) -> float:
        """Return images a second from JPEG to predictions; the next batch is decoded during each batch."""
        free: Queue[torch.Tensor] = Queue()
        ready: Queue[tuple[torch.Tensor, list[Any]]] = Queue()
        for _ in range(3):
            free.put(torch.zeros((self._batch, *self._model.input_shape), dtype=torch.uint8))
        stopped = threading.Event()

        def fill() -> None:
            with ThreadPoolExecutor(self._threads) as pool:
                while not stopped.is_set():
                    pixels = free.get()
                    rows = [pool.submit(decode_into, self._model, image, header, row) for row in pixels]
                    ready.put((pixels, [row.result() for row in rows]))

        filler = threading.Thread(target=fill)
        filler.start()
        done = 0
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            pixels, placements = ready.get()
            outputs = self._executable.run(pixels.numpy())
            for row, placement in enumerate(placements):
                reduced = self._model.reduce(outputs, row, Options())
                self._model.postprocess(reduced, placement, Options())
            free.put(pixels)
            done += self._batch
        elapsed_s = time.perf_counter() - started_s
        stopped.set()
        free.put(pixels)
        filler.join()
        return done / elapsed_s

    def one_image_ms(self, image: bytes, header: Header) -> float:
        """Return the median milliseconds of one image alone: decode, preprocess, engine, postprocess."""
        pixels = torch.zeros((1, *self._model.input_shape), dtype=torch.uint8)
        times = []
        for _ in range(60):
            started_s = time.perf_counter()
            placement = decode_into(self._model, image, header, pixels[0])
            outputs = self._executable.run(pixels.numpy())
            self._model.postprocess(self._model.reduce(outputs, 0, Options()), placement, Options())
            times.append(time.perf_counter() - started_s)
        return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
