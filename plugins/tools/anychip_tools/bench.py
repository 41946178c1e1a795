"""`anychip bench`: speed of a network on a device, or of a service under load."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from anychip_tools import report
from anychip_tools.charts import draw, plot_file
from anychip_tools.options import DEVICE_SETTINGS, numbers
from anychip_tools.report import progress
from app.arguments import CommandError, add_settings, read_settings
from app.config import Settings
from app.config.values import split
from app.telling import say

TEXT = "How fast a network is on a device, or a service under load."
EXAMPLE = "anychip bench resnet50 --sizes 1,4,16"
_DEVICE = (
    "engine",
    "precision",
    "batch_size",
    "p50_ms",
    "p90_ms",
    "p99_ms",
    "images_per_s",
    "allocated_mib",
    "reserved_mib",
    "resident_mib",
    "joules_per_image",
)
_SERVICE = (
    "protocol",
    "mode",
    "connections",
    "rate",
    "batch",
    "images_per_s",
    "goodput_per_s",
    "p50_ms",
    "p90_ms",
    "p99_ms",
    "errors",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name or a file; with --url the service's name of the model")
    add("--sizes", default="1,2,4,8", help="batch sizes on the device (default: %(default)s)")
    add("--engines", default="auto", help="engines, by commas, or all (default: %(default)s)")
    add("--precisions", default="auto", help="precisions, by commas, or all (default: %(default)s)")
    add("--seconds", type=float, default=3.0, help="length of one measurement (default: %(default)g)")
    add("--url", default="", help="load a service instead, e.g. http://127.0.0.1:8000")
    add("--protocol", choices=("predict", "v2"), default="predict", help="anychip's own route, or Open Inference")
    add("--connections", default="1,8,32", help="closed loop, by commas (default: %(default)s)")
    add("--rates", default="", help="open loop: requests a second, by commas")
    add("--timeout-ms", type=float, default=1000, help="what is in time in open loop (default: 1000)")
    add("--batch", type=int, default=1, help="items in a request of tensors (default: 1)")
    add("--key", default=os.environ.get("ANYCHIP_KEY", ""), help="API key (default: $ANYCHIP_KEY)")
    add("--image", type=Path, help="the JPEG that is sent (default: one of anychip's)")
    add("--output", type=Path, metavar="FILE", help="write the results there as JSON")
    add("--plot", type=plot_file, metavar="FILE", help="draw them there, as SVG, by matplotlib")
    add("--json", action="store_true", help="print JSON")
    add_settings(parser, DEVICE_SETTINGS)


def run(parsed: argparse.Namespace) -> int:
    """Return exit code 1 if requests failed, or every engine refused. Raises CommandError."""
    if parsed.seconds <= 0 or parsed.batch < 1:
        raise CommandError("--seconds must be more than 0, and --batch 1 or more")
    document = _of_service(parsed) if parsed.url else _of_device(parsed, read_settings(parsed))
    if parsed.output:
        parsed.output.write_text(report.in_json(document) + "\n", encoding="utf-8")
    if parsed.plot:
        draw(document, parsed.plot)
    report.show_or_print(document, show, as_json=parsed.json)
    return 1 if not document["results"] or any(row.get("errors") for row in document["results"]) else 0


def _of_device(parsed: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    say(f"opening {parsed.model}")
    from anychip_tools.benchmark.device_sweep import sweep
    from anychip_tools.subjects import load, open_device, open_named
    from app.precision.probes import probes
    from backends import EngineRefusedError, OutOfDeviceMemoryError

    model = open_named(parsed.model, settings)
    choice, device = open_device(settings)
    facts = choice.backend.facts
    engines = [*facts.engines, *facts.by_name] if parsed.engines == "all" else list(split(parsed.engines))
    precisions = list(facts.precisions) if parsed.precisions == "all" else list(split(parsed.precisions))
    sizes = model.batch_sizes(sorted(set(numbers(parsed.sizes, "--sizes", int))))
    items = probes(model)
    results: list[dict[str, Any]] = []
    refusals: dict[str, str] = {}
    pairs = [(engine, precision) for engine in engines for precision in precisions]
    with progress(quiet=parsed.json) as bars:
        task = bars.add_task("measuring", total=len(pairs) * len(sizes))
        for number, (engine, precision) in enumerate(pairs):
            bars.update(task, description=f"{engine} {precision}", completed=number * len(sizes))
            try:
                loaded = load(model, settings, choice, engine=engine, precision=precision, sizes=sizes, items=items)
                for row in sweep(choice.backend, device, loaded, items, parsed.seconds):
                    results.append(row)
                    bars.advance(task)
            except (EngineRefusedError, OutOfDeviceMemoryError) as error:
                refusals[f"{engine} {precision}"] = str(error)
    found = _document("device", model.name, results, device, choice.device(device).name)
    return {**found, "simulated": choice.simulated, "refusals": refusals}


def _of_service(parsed: argparse.Namespace) -> dict[str, Any]:
    from anychip_tools.benchmark.service import LoadedService
    from app.precision.probes import probe_files

    url, image = parsed.url.rstrip("/"), parsed.image.read_bytes() if parsed.image else probe_files()[0]
    connections = numbers(parsed.connections, "--connections", int) if parsed.connections else []
    rates = numbers(parsed.rates, "--rates", float) if parsed.rates else []
    rows = []
    with progress(quiet=parsed.json) as bars:
        task = bars.add_task(f"{parsed.protocol} at {parsed.url}", total=len(connections) + len(rates))
        service = LoadedService(url, parsed.model, parsed.protocol, image, batch=parsed.batch, key=parsed.key)
        service.warm_up()
        for count in connections:
            rows.append(service.closed(count, parsed.seconds))
            bars.advance(task)
        for rate in rates:
            rows.append(service.open(rate, parsed.seconds, parsed.timeout_ms / 1e3))
            bars.advance(task)
    return {**_document("service", parsed.model, rows), "url": parsed.url}


def _document(kind: str, model: str, results: list[dict[str, Any]], *device: str) -> dict[str, Any]:
    measured = {"simulated": False, "results": results, "refusals": {}, "environment": report.environment(*device)}
    return {"kind": kind, "model": model, **measured}


def show(document: dict[str, Any]) -> None:
    """Print the results in the terminal."""
    columns = _DEVICE if document["kind"] == "device" else _SERVICE
    console = report.console()
    environment = document["environment"]
    where = document.get("url") or f"{environment['device']} {environment['device_name']}".strip()
    simulated = " (simulated: the times are the CPU's)" if document["simulated"] else ""
    console.print(f"{document['model']}: {document['kind']} {where}{simulated}", soft_wrap=True)
    if rows := [[row.get(name) for name in columns] for row in document["results"]]:
        console.print(report.table("", [name.replace("_", " ") for name in columns], rows))
    for name, reason in document["refusals"].items():
        console.print(f"{name}: {reason}", soft_wrap=True)
    versions = ", ".join(f"{name} {value}" for name, value in environment.items() if value and name != "device_name")
    console.print(versions, soft_wrap=True)
