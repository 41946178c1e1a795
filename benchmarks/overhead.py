"""Measure the service's own cost: answers a second and CPU time a request, on a device that computes nothing.

`anychip serve --device null` runs beside the least a FastAPI handler can do, under the same load, turn and turn about
in one run. A second service must read its images, so that it decodes them: it gets the same JPEG (`decoded`)
and pixels as a binary tensor of the Open Inference Protocol (`pixels`), which must cost little more than the JPEG
without its decoding. A third one has eight devices, each with a worker (`8 workers`): the cost of an image must hardly
grow with them. CPU time is that of the whole process tree and, unlike the rate, hardly depends on other work of the
machine.

    python -m benchmarks.overhead [--connections 16] [--seconds 5] [--rounds 3] [--json FILE]

Owns: the image that is sent, the rounds, the table and the aims.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from anychip_tools.benchmark.load import drive
from app.decoder.decoder import decode_into
from app.images.header import read_header
from backends.host import core_count
from benchmarks import servers
from models import PixelModel, open_model, parse_spec

AIM_ANSWERS_PER_S = 3500
AIM_CPU_MS = 0.30
AIM_EIGHT_WORKERS = 1.2  # Factor on the CPU time of an image with one worker.
AIM_PIXELS = 1.2  # Factor on the CPU time of a JPEG without its decoding.
IMAGE_BYTES = 65_000  # An ordinary photograph of 500 by 375 pixels.
EIGHT = {"ANYCHIP_NULL": "devices=8"}
LOOKS = {"ANYCHIP_NULL": "fail=999999999"}  # A fault that no run reaches, but that counts batches.
DECODES = 200


def main() -> None:
    """Run the measurements and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", default="random")
    parser.add_argument("--device", default="null", help="any other adds its computation to the figures")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured; the median counts")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    report = measure(given)
    _print(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure rounds of services and plain handler, in sequence; return medians over the rounds."""
    image = noise_jpeg(IMAGE_BYTES)
    model = open_model(parse_spec(f"{given.model}:random"), Path())
    if not isinstance(model, PixelModel):
        raise SystemExit(f"{given.model} takes no images")
    options = ("--weights", given.weights, "--device", given.device)
    with (
        servers.service(given.model, *options) as service,
        servers.service(given.model, *options, environment=LOOKS) as looking,
        servers.service(given.model, *options, environment=EIGHT) as eight,
        servers.plain() as plain,
    ):
        targets = {
            "service": (service, servers.service_request(given.model, image)),
            "8 workers": (eight, servers.service_request(given.model, image)),
            "plain": (plain, servers.plain_request(image)),
            "decoded": (looking, servers.service_request(given.model, image)),
            "pixels": (looking, servers.pixels_request(given.model, model.input_shape)),
        }
        rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in targets}
        decodes_ms = []
        for server, request in targets.values():
            drive(server.port, request, given.connections, 0.5)  # Warm-up.
        for _ in range(given.rounds):
            for kind, (server, request) in targets.items():
                rounds[kind].append(measure_once(server, request, given.connections, given.seconds))
            decodes_ms.append(decode_ms(model, image))
    return {
        "model": given.model,
        "weights": given.weights,
        "device": given.device,
        "image_bytes": len(image),
        "connections": given.connections,
        "seconds": given.seconds,
        "rounds": given.rounds,
        "cores": core_count(),
        "date": time.strftime("%Y-%m-%d"),
        "decode_ms": round(statistics.median(decodes_ms), 3),
        **{kind: medians(measured) for kind, measured in rounds.items()},
    }


def decode_ms(model: PixelModel, image: bytes) -> float:
    """Return the CPU time of decoding and placing an image like the service, on as many threads, all at work."""

    def thread_s(_: int) -> float:
        target = torch.empty(model.input_shape, dtype=torch.uint8)
        begun_s = time.thread_time()
        for _ in range(DECODES):
            decode_into(model, image, header, target)
        return time.thread_time() - begun_s

    torch.set_num_threads(1)  # Like the service; only this thread's time is counted.
    header = read_header(image)
    threads = max(2, core_count())
    with ThreadPoolExecutor(threads) as pool:
        return statistics.mean(pool.map(thread_s, range(threads))) / DECODES * 1e3


def measure_once(server: servers.Server, request: bytes, connections: int, seconds: float) -> dict[str, float]:
    """Measure rate, latency, and CPU time an answer once. Raises RuntimeError if there is nothing to compare."""
    before, generator_s = server.cpu_time(), time.process_time()
    load = drive(server.port, request, connections, seconds)
    after, generator_s = server.cpu_time(), time.process_time() - generator_s
    answers = len(load.latencies_s)
    if load.errors or not answers:
        raise RuntimeError(f"{answers} answers, errors {load.errors}: there is nothing to compare")
    server_s = after.server_s - before.server_s
    workers_s = after.workers_s - before.workers_s
    return {
        "answers_per_s": load.answers_per_s,
        "p50_ms": load.percentile_ms(50),
        "p99_ms": load.percentile_ms(99),
        "cpu_ms": (server_s + workers_s) / answers * 1e3,
        "server_cpu_ms": server_s / answers * 1e3,
        "worker_cpu_ms": workers_s / answers * 1e3,
        "generator_cores": generator_s / load.seconds,
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return each figure's median over the rounds."""
    return {name: round(statistics.median(figures[name] for figures in rounds), 3) for name in rounds[0]}


def noise_jpeg(size_bytes: int) -> bytes:
    """Make a JPEG of about so many bytes: soft shapes under noise, the same every time."""
    source = np.random.default_rng(0)
    shapes = Image.fromarray(source.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
        (500, 375), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(shapes, dtype=np.float32) + source.normal(0, 12, (375, 500, 1))
    image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    encoded: list[bytes] = []
    for quality in range(30, 96, 3):
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        encoded.append(file.getvalue())
    return min(encoded, key=lambda jpeg: abs(len(jpeg) - size_bytes))


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['model']} ({report['weights']}) on {report['device']}, JPEG of {report['image_bytes']} bytes, "
        f"{report['connections']} connections, {report['rounds']} rounds of {report['seconds']:g} s, "
        f"{report['cores']} cores"
    )
    print(
        f"{'':9}{'answers/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms a request':>18}{'of it server':>14}{'worker':>8}"
        f"{'generator cores':>17}"
    )
    for kind in ("service", "8 workers", "plain", "decoded", "pixels"):
        row = report[kind]
        print(
            f"{kind:9}{row['answers_per_s']:>11.0f}{row['p50_ms']:>9.2f}{row['p99_ms']:>9.2f}{row['cpu_ms']:>18.3f}"
            f"{row['server_cpu_ms']:>14.3f}{row['worker_cpu_ms']:>8.3f}{row['generator_cores']:>17.2f}"
        )
    service, plain = report["service"], report["plain"]
    print(
        f"service / plain: answers {service['answers_per_s'] / plain['answers_per_s']:.2f}, "
        f"CPU {service['cpu_ms'] / plain['cpu_ms']:.2f}"
    )
    print(f"answers/s: {service['answers_per_s']:.0f} (aim: >= {AIM_ANSWERS_PER_S})")
    print(f"CPU a request: {service['cpu_ms']:.3f} ms (aim: <= {AIM_CPU_MS:.2f})")
    eight = report["8 workers"]["cpu_ms"] / service["cpu_ms"]
    print(f"CPU a request with 8 workers / with one: {eight:.2f} (aim: <= {AIM_EIGHT_WORKERS})")
    pixels, decoded, decode = report["pixels"]["cpu_ms"], report["decoded"]["cpu_ms"], report["decode_ms"]
    ratio = pixels / (decoded - decode)
    print(f"pixels / (decoded - decode): {pixels} / ({decoded} - {decode}) = {ratio:.2f} (aim: <= {AIM_PIXELS})")


if __name__ == "__main__":
    main()
