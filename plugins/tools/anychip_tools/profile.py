"""`anychip profile`: a timeline of some batches, as a trace for Perfetto or Chrome, and the time of each stage."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anychip_tools import report
from anychip_tools.options import DEVICE_SETTINGS
from app.arguments import CommandError, add_settings, read_settings
from app.telling import say

TEXT = "A timeline of some batches, and where the time goes."
EXAMPLE = "anychip profile resnet50 --output trace.json"
_STAGES = ("decode", "infer", "reduce", "postprocess")
_WARM_UP_BATCHES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name, name=architecture:weights, or a file")
    add("--batches", type=int, default=10, help="batches in the timeline (default: %(default)s)")
    add("--batch-size", type=int, default=8, help="items in a batch (default: %(default)s)")
    add("--image", type=Path, help="the JPEG that is decoded (default: one of anychip's)")
    add(
        "--output",
        type=Path,
        default=Path("anychip-trace.json"),
        metavar="FILE",
        help="the trace (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON")
    add_settings(parser, (*DEVICE_SETTINGS, "engine", "precision"))


def run(parsed: argparse.Namespace) -> int:
    """Write the trace and print the stages. Raises CommandError, ModelError, BackendError, OSError."""
    if parsed.batches < 1 or parsed.batch_size < 1:
        raise CommandError("--batches and --batch-size must be 1 or more")
    document = profile(parsed)
    report.show_or_print(document, show, as_json=parsed.json)
    return 0


def profile(parsed: argparse.Namespace) -> dict[str, Any]:
    """Load the network, warm it up, and run some batches under PyTorch's profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Else Kineto logs its start and stop.
    settings = read_settings(parsed)
    say(f"opening {parsed.model}")
    import torch

    from anychip_tools.subjects import load, open_device, open_named
    from app.precision.probes import probes

    model = open_named(parsed.model, settings)
    choice, device = open_device(settings)
    named = choice.device(device)
    [size] = model.batch_sizes((parsed.batch_size,))
    how = {"engine": settings.engine, "precision": settings.precision}
    executable, loaded = load(model, settings, choice, **how, sizes=(size,), items=probes(model))
    seconds = dict.fromkeys(_STAGES, 0.0)

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        with torch.profiler.record_function(f"anychip: {name}"):
            yield
        seconds[name] += time.perf_counter() - began_s

    batch = _batches(model, size, parsed.image, stage)
    for _ in range(_WARM_UP_BATCHES):
        batch(executable)
    seconds.update(dict.fromkeys(_STAGES, 0.0))
    supported: Any = torch.profiler.supported_activities  # It has no types.
    kind = choice.backend.facts.device_type
    wanted = ("CPU", kind.upper() if kind in ("cuda", "xpu", "cpu", "null") else "PrivateUse1")
    activities = [each for each in supported() if each.name in wanted]
    with torch.profiler.profile(activities=activities) as profiler:
        began_s = time.perf_counter()
        for _ in range(parsed.batches):
            batch(executable)
        whole_s = time.perf_counter() - began_s
    executable.close()
    profiler.export_chrome_trace(str(parsed.output))
    images = parsed.batches * size
    return {
        "model": model.name,
        "engine": loaded.engine,
        "precision": loaded.precision,
        "batch_size": size,
        "batches": parsed.batches,
        "simulated": choice.simulated,
        "images_per_s": images / whole_s,
        "stages": [
            {"stage": name, "ms_per_image": spent_s / images * 1e3, "share": spent_s / whole_s}
            for name, spent_s in {**seconds, "other": max(0.0, whole_s - sum(seconds.values()))}.items()
        ],
        "trace": str(parsed.output),
        "environment": report.environment(device, named.name),
    }


def _batches(model: Any, size: int, image: Path | None, stage: Callable[[str], Any]) -> Callable[[Any], None]:
    from anychip_tools.subjects import inputs_of
    from app.decoder.decoder import decode_into
    from app.images.header import read_header
    from app.precision.probes import probe_files
    from models import Options, PixelModel, TensorOptions

    pixels = inputs_of(model, size)
    encoded = image.read_bytes() if image else probe_files()[0]
    header = read_header(encoded)
    of_images = isinstance(model, PixelModel)
    options = Options() if of_images else TensorOptions(tuple(range(len(model.outputs))))

    def batch(executable: Any) -> None:
        if of_images:
            with stage("decode"):
                placements = [decode_into(model, encoded, header, row) for row in pixels]
        with stage("infer"):
            outputs = executable.run(pixels.numpy())
        with stage("reduce"):
            reduced = [model.reduce(outputs, row, options) for row in range(size)]
        if of_images:
            with stage("postprocess"):
                for arrays, placement in zip(reduced, placements, strict=True):
                    model.postprocess(arrays, placement, options)

    return batch


def show(document: dict[str, Any]) -> None:
    """Print the stages in the terminal."""
    console = report.console()
    simulated = " (simulated: the times are the CPU's)" if document["simulated"] else ""
    console.print(
        f"{document['model']} on {document['environment']['device']}{simulated}, {document['engine']} "
        f"{document['precision']}, {document['batches']} batches of {document['batch_size']}: "
        f"{document['images_per_s']:.1f} images/s, one after the other"
    )
    stages = [(each["stage"], each["ms_per_image"], f"{each['share']:.1%}") for each in document["stages"]]
    console.print(report.table("", ("stage", "ms an image", "share"), stages))
    console.print(f"\ntrace: {document['trace']}; open it at https://ui.perfetto.dev or chrome://tracing")
