"""Compare exported files with our own networks and two stages with their parts; measure the cost of masks.

    python -m benchmarks.your_network masks                          # CPU time of postprocessing, one core
    python -m benchmarks.your_network export --file yolov8n.onnx     # beside our own yolov8n, same engine, same run
    python -m benchmarks.your_network stages [--seconds 10]          # a service of two stages beside its parts

Variants run turn and turn about in one process (`export`) or against one service (`stages`), so that other work of the
machine hits all of them. Owns: these three measurements and their aims (docs/performance.md).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from anychip_tools.benchmark.load import drive
from app.precision.gate import compile_options
from backends.vendors.cpu import CpuBackend
from benchmarks import servers
from models import Model, Options, PixelModel, open_model, parse_spec
from models.contract.model import Array
from models.sample import IMAGES

AIM_MASKS_MS = 3.0
AIM_EXPORT = 0.95
AIM_STAGES = 0.9
SIDE = 640
INSTANCES = 10
_CLASSES = 80
_COEFFICIENTS = 32


def main() -> None:
    """Run the measurements and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_masks = kinds.add_parser("masks")
    of_masks.add_argument("--rounds", type=int, default=200)
    of_export = kinds.add_parser("export")
    of_export.add_argument("--file", required=True, help="yolov8n as Ultralytics exports it, at 640")
    of_export.add_argument("--engine", default="auto")
    of_export.add_argument("--precision", default="fp32")
    of_export.add_argument("--size", type=int, default=4, help="images of a batch")
    of_export.add_argument("--rounds", type=int, default=20)
    of_stages = kinds.add_parser("stages")
    of_stages.add_argument("--seconds", type=float, default=10)
    of_stages.add_argument("--rounds", type=int, default=3)
    of_stages.add_argument("--connections", type=int, default=8)
    given = parser.parse_args()
    if given.kind == "masks":
        masks(given.rounds)
    elif given.kind == "export":
        export(given.file, given.engine, given.precision, given.size, given.rounds)
    else:
        stages(given.seconds, given.rounds, given.connections)


def masks(rounds: int) -> None:
    """Print CPU milliseconds an image of 640 x 480, by size of instances: the work after the network."""
    torch.set_num_threads(1)
    model = open_model(parse_spec("yolov8n-seg:random"), Path())
    assert isinstance(model, PixelModel)
    placement = model.placement(SIDE, 480)
    print(f"{INSTANCES} instances in {SIDE} x 480, ms of one core an image (aim: {AIM_MASKS_MS:g})")
    for share in (0.1, 0.25, 0.5, 0.9):
        outputs = instances(share)
        forms: dict[str, list[float]] = {"polygon": [], "rle": [], "none": []}
        for form in [*forms] * rounds:
            options = Options(masks=form)  # type: ignore[arg-type]
            started_s = time.process_time()
            answer = model.postprocess(model.reduce(outputs, 0, options), placement, options)
            forms[form].append((time.process_time() - started_s) * 1e3)
            assert len(answer["detections"]) == INSTANCES
        figures = ", ".join(f"{form} {statistics.median(times):.2f}" for form, times in forms.items())
        print(f"  sides of {share:.0%} of the image: {figures}", flush=True)


def instances(share: float) -> tuple[Array, ...]:
    """Make a network's outputs for one image: round instances with this share of its sides, all over it."""
    generator = np.random.default_rng(0)
    anchors = sum((SIDE // stride) ** 2 for stride in (8, 16, 32))
    boxes = np.zeros((1, anchors, 4), np.float32)
    scores = np.zeros((1, anchors), np.float32)
    classes = np.zeros((1, anchors), np.int32)
    extras = np.zeros((1, anchors, _COEFFICIENTS), np.float32)
    prototypes = generator.normal(0, 0.05, (1, _COEFFICIENTS, SIDE // 4, SIDE // 4)).astype(np.float32)
    y, x = np.mgrid[: SIDE // 4, : SIDE // 4]
    for number in range(INSTANCES):
        width, height = SIDE * share, 480 * share
        left = generator.uniform(0, SIDE - width)
        top = 80 + generator.uniform(0, 480 - height)
        boxes[0, number] = left, top, left + width, top + height
        # One class each: none suppresses another.
        scores[0, number], classes[0, number] = 0.9 - number / 100, number
        centre_x, centre_y = (left + width / 2) / 4, (top + height / 2) / 4
        wobble = 1 + 0.1 * np.sin(6 * np.arctan2(y - centre_y, x - centre_x))
        distance = np.hypot((x - centre_x) / (width / 8), (y - centre_y) / (height / 8))
        prototypes[0, number] += 5 * (wobble - distance)
        extras[0, number, number] = 1
    return boxes, scores, classes, extras, prototypes


def export(file: str, engine: str, precision: str, size: int, rounds: int) -> None:
    """Print the images a second of a file and of our own network, by the same engine."""
    backend = CpuBackend(None)
    pixels = np.random.default_rng(0).integers(0, 256, (size, SIDE, SIDE, 3), dtype=np.uint8)
    runs: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("yolov8n:random", f"exported={file}"):
            model: Model = open_model(parse_spec(name), Path())
            options = compile_options(model, None, None, Path(cache))
            loaded = backend.load(model.network(), "cpu:0", engine, precision, (size,), options=options)
            print(f"{name}: {loaded.report.engine} {loaded.report.precision}", flush=True)
            runs[name] = partial(loaded.executable.run, pixels)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for name in [*runs] * (rounds + 1):
            started_s = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - started_s)
    own, exported = (statistics.median(times[1:]) for times in seconds.values())
    print(f"batches of {size}: our own {size / own:.1f} images a second, exported {size / exported:.1f}")
    print(f"exported / our own: {own / exported:.3f} (aim: {AIM_EXPORT})")


def stages(seconds: float, rounds: int, connections: int) -> None:
    """Print the requests a second of two stages, and what their parts allow together.

    Each request has the detector once and the classifier for every box: the allowed time of a request of two stages
    is that of the detector's and of so many of the classifier's, each alone at full load.
    """
    image = (IMAGES / "detect_1.jpg").read_bytes()
    specs = "both=yolov8n?most=3 > resnet50"
    with servers.service(specs, "--weights", "sample", "--device", "cpu") as server:
        rates: dict[str, list[float]] = {"both": [], "yolov8n": [], "resnet50": []}
        for name in [*rates] * rounds:
            load = drive(server.port, servers.service_request(name, image), connections, seconds)
            rates[name].append(load.answers_per_s)
            print(f"  {name}: {rates[name][-1]:.1f} a second", flush=True)
    both, detector, classifier = (statistics.median(each) for each in rates.values())
    allowed = 1 / (1 / detector + 3 / classifier)
    print(f"two stages {both:.2f} a second, its parts allow {allowed:.2f}: {both / allowed:.2f} (aim: {AIM_STAGES})")


if __name__ == "__main__":
    main()
