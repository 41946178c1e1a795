"""Comparison of `anychip predict` over many small images with the rates of decoding and of the device alone.

    python -m benchmarks.offline_prediction --images 20000

One process measures in sequence: decoding alone (the command's decoders, and nothing else), the
device alone (full batches, nothing decoded) and the whole command with its output file. The device is `null`, which
sleeps for a given time and takes no processor time, so that the smaller of the two rates is the command's limit.
The command's rate is the one it prints: from the first image on, without the time that loading takes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import re
import resource
import tempfile
import time
from collections import deque
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from anychip_tools.null import backend as null
from anychip_tools.prediction.files import find_images
from anychip_tools.prediction.offline import DecodedFile, LocalPredictor
from app.cli import main as anychip
from app.config import Settings
from backends import Started
from models import Options, open_model, parse_spec

_MODEL = "resnet18"


def write_images(folder: Path, count: int, side: int) -> None:
    """Write JPEG files of `side` x `side` pixels, with 32 different contents."""
    random = np.random.default_rng(0)
    encoded = []
    for _ in range(32):
        small = Image.fromarray(random.integers(0, 255, (side // 8, side // 8, 3), np.uint8))
        stream = io.BytesIO()
        small.resize((side, side), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
        encoded.append(stream.getvalue())
    for number in range(count):
        path = folder / f"{number // 1000:03}" / f"{number:06}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded[number % len(encoded)])


def decoding_rate(predictor: LocalPredictor, folder: Path) -> tuple[float, float]:
    """Return the images a second that the command's decoders place into its blocks, with nothing else to do; and
    the processor time of one.
    """
    paths = [source.path for source in find_images([str(folder)])]
    under_way: deque[list[Future[list[DecodedFile]]]] = deque()
    started_s, before_s = time.perf_counter(), processor_s()
    for number, first in enumerate(range(0, len(paths), predictor.block_size)):
        if len(under_way) == len(predictor.pixels):
            wait(under_way.popleft())
        block = number % len(predictor.pixels)
        under_way.append(predictor.decode(block, paths[first : first + predictor.block_size]))
    for parts in under_way:
        wait(parts)
    elapsed_s = time.perf_counter() - started_s
    return len(paths) / elapsed_s, (processor_s() - before_s) / len(paths)


def device_rate(predictor: LocalPredictor, batch_size: int, seconds: float = 5.0) -> float:
    """Return images a second of full batches, as many in flight as the device takes."""
    executable = predictor.executable
    buffers = [executable.buffer(batch_size) for _ in range(executable.depth)]
    under_way: deque[Started] = deque()
    batches, started_s = 0, time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        if len(under_way) == executable.depth:
            under_way.popleft().outputs()
            batches += 1
        under_way.append(executable.start(buffers[0]))
        buffers.append(buffers.pop(0))
    return batches * batch_size / (time.perf_counter() - started_s)


def run_command(arguments: list[str]) -> tuple[float, float]:
    """Return the images a second that the command prints, and the processor time of all its processes."""
    said, before_s = io.StringIO(), processor_s()
    with contextlib.redirect_stderr(said):
        assert anychip(arguments) == 0
    return float(re.findall(r"([\d.]+) images/s", said.getvalue())[-1]), processor_s() - before_s


def processor_s() -> float:
    """Return the processor time of this process, of its running children, and of those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = [psutil.Process(each.pid).cpu_times() for each in multiprocessing.active_children()]
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(each.user + each.system for each in running)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="How near anychip predict comes to decoding and the device.")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=128, help="pixels of an image's side (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--delays-ms", default="0,2,12", help="what a batch takes on the device, one run each")
    parser.add_argument("--depth", type=int, default=2, help="batches that the device takes at a time (default: 2)")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "images"
        folder.mkdir()
        write_images(folder, parsed.images, parsed.side)
        for delay_ms in map(float, parsed.delays_ms.split(",")):
            told = f"delay_ms={delay_ms:g},depth={parsed.depth}"
            null.configure(told)
            settings = Settings(device="null", weights="random")
            model = open_model(parse_spec(_MODEL, "random"), settings.weights_dir)
            predictor = LocalPredictor(model, settings, Options(), parsed.batch_size, many=True)
            decoding, decoding_cpu_s = decoding_rate(predictor, folder)
            device = device_rate(predictor, parsed.batch_size)
            predictor.close()
            output = Path(name) / f"{delay_ms:g}.jsonl"
            command = ["predict", _MODEL, str(folder), "--output", str(output), "--batch-size", str(parsed.batch_size)]
            whole, whole_cpu_s = run_command([*command, "--device", "null", "--weights", "random", "--null", told])
            few = ["predict", _MODEL, str(folder / "000"), "--output", str(output), "--overwrite", *command[5:]]
            few_count = min(1000, parsed.images)
            _, few_cpu_s = run_command([*few, "--device", "null", "--weights", "random", "--null", told])
            # The common part of both runs, above all loading, belongs to no image.
            cpu_s = (whole_cpu_s - few_cpu_s) / max(1, parsed.images - few_count)
            limit = min(decoding, device)
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"processor time an image: decoding {decoding_cpu_s * 1e6:.0f} us, predict {cpu_s * 1e6:.0f} us; "
                f"batch {delay_ms:g} ms: decoding alone {decoding:.0f}/s, device alone {device:.0f}/s, "
                f"predict {whole:.0f}/s = {whole / limit:.2f} of the smaller; peak memory {peak_mib:.0f} MiB"
            )


if __name__ == "__main__":
    main()
