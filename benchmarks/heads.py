"""Compare YOLOv8n on OpenVINO with the best anchors chosen in the network and with all of them in float32.

    python -m benchmarks.heads [--rounds 30]

Compared are the processor time of a batch, which other work on the machine changes less than the clock's, and
the worker's work afterwards for an image, turn and turn about. Batches run as in the engine: one image by all
threads, several images with a stream each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from backends.engines.openvino import _converted
from backends.host import core_count
from benchmarks.gpu.asked import Asked
from benchmarks.gpu.head import AllAnchors
from models import Options

SIZES = (1, 4)


def main() -> None:
    """Run the measurements and print the figures."""
    import openvino

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    model, core, threads = Asked("cpu").models()[1], openvino.Core(), core_count()
    pixels = np.random.default_rng(0).integers(0, 256, (SIZES[-1], *model.input_shape), dtype=np.uint8)
    best = model.network()
    every = AllAnchors(best.core, model.input_shape, model.mean, model.std).eval().requires_grad_(False)
    networks = {"all": _converted(every), "best": _converted(best)}
    calls: dict[tuple[str, int, str], Callable[[], Any]] = {}
    for precision in ("bf16", "f32"):
        for size in SIZES:
            streams = min(size, threads)
            options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams}
            for name, network in networks.items():
                compiled = core.compile_model(network, "CPU", options)
                requests = [compiled.create_infer_request() for _ in range(size)]
                calls[precision, size, name] = lambda requests=requests: _batch(openvino, requests, pixels)
    outputs = {name: calls["bf16", 1, name]() for name in networks}
    taken: dict[tuple[str, int, str], list[float]] = {key: [] for key in calls}
    for number in range(rounds):
        for key, call in list(calls.items())[:: 1 if number % 2 else -1]:
            began_s = time.process_time()
            call()
            taken[key].append(time.process_time() - began_s)
    print(f"load {os.getloadavg()[0]:.1f}, {rounds} rounds, milliseconds of the processor at the median")
    for precision, size in dict.fromkeys(key[:2] for key in calls):
        pair = [taken[precision, size, name] for name in ("all", "best")]
        ratio = statistics.median(a / b for a, b in zip(*pair, strict=True))
        each = ", ".join(f"{1e3 * statistics.median(times):.1f}" for times in pair)
        print(f"{precision} batch {size}: all and best {each}; all / best {ratio:.3f} at the median of pairs")
    outputs["all"].append(np.arange(outputs["all"][1].shape[1], dtype=np.int32)[None])
    for name, found in outputs.items():
        batch = [np.repeat(each, 4, axis=0) for each in found]
        print(f"{name}: the worker then takes {min(_reduced_us(model, batch) for _ in range(200)):.0f} us an image")


def _batch(openvino: Any, requests: list[Any], pixels: Any) -> list[Any]:
    for row, request in enumerate(requests):
        request.set_input_tensor(0, openvino.Tensor(pixels[row : row + 1], shared_memory=True))
        request.start_async()
    for request in requests:
        request.wait()
    return [np.array(each.data) for each in requests[0].output_tensors]


def _reduced_us(model: Any, batch: list[Any]) -> float:
    began_s = time.perf_counter()
    for each in batch:
        if each.dtype.kind == "f":
            np.isfinite(each).all()
    model.reduce_all(batch, [Options()] * 4)
    return (time.perf_counter() - began_s) / 4 * 1e6


if __name__ == "__main__":
    main()
