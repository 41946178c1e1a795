"""`anychip bench`: speed of a network on a device, of a service under load, or of decoding; comparison of results.

Owns: the options, and how results are shown. Must not import torch at its head: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anychip_tools import report
from anychip_tools.charts import Chart, draw, plot_file
from anychip_tools.options import DEVICE_SETTINGS, numbers
from anychip_tools.report import progress
from app.arguments import CommandError, add_settings, read_settings
from app.config import Settings, split
from app.telling import telling

if TYPE_CHECKING:
    from anychip_tools.benchmark.endpoints import Protocol

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
_DECODING = ("threads", "images_per_s", "p50_ms", "p99_ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a name or a file; with --url the service's name of the model"
    )
    parser.add_argument("--sizes", default="1,2,4,8", help="batch sizes on the device (default: %(default)s)")
    parser.add_argument("--engines", default="auto", help="engines, by commas, or all (default: %(default)s)")
    parser.add_argument("--precisions", default="auto", help="precisions, by commas, or all (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (default: %(default)g)")
    parser.add_argument(
        "--url", default="", help="load a service instead, e.g. http://127.0.0.1:8000, or grpc://host:8001"
    )
    parser.add_argument(
        "--protocol", choices=("predict", "v2", "grpc"), help="anychip's route, Open Inference over HTTP or over gRPC"
    )
    parser.add_argument("--connections", default="1,8,32", help="closed loop, by commas (default: %(default)s)")
    parser.add_argument("--rates", default="", help="open loop: requests a second, by commas")
    parser.add_argument("--timeout-ms", type=float, default=1000, help="what is in time in open loop (default: 1000)")
    parser.add_argument("--batch", type=int, default=1, help="items in a request of tensors (default: 1)")
    parser.add_argument("--json-tensors", action="store_true", help="send tensors as JSON and not as bytes")
    parser.add_argument("--key", default=os.environ.get("ANYCHIP_KEY", ""), help="API key (default: $ANYCHIP_KEY)")
    parser.add_argument("--image", type=Path, help="the JPEG that is sent or decoded (default: one of anychip's)")
    parser.add_argument("--decode", action="store_true", help="measure decoding alone, over numbers of threads")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="two files of --output side by side")
    parser.add_argument("--tolerance", type=float, default=0.05, help="what counts as slower (default: %(default)g)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results there as JSON")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="draw them there, as SVG, by matplotlib")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(parser, DEVICE_SETTINGS)


def run(parsed: argparse.Namespace) -> int:
    """Return exit code 1 if requests failed, every engine refused, or a comparison is slower. Raises CommandError."""
    if parsed.compare:
        return _compared(parsed)
    if not parsed.model:
        raise CommandError("name a MODEL, or two files: --compare BEFORE AFTER")
    if parsed.seconds <= 0 or parsed.batch < 1:
        raise CommandError("--seconds must be more than 0, and --batch 1 or more")
    settings = read_settings(parsed)
    columns: Sequence[str]
    if parsed.url:
        document, columns = _of_service(parsed), _SERVICE
    elif parsed.decode:
        document, columns = _of_decoding(parsed, settings), _DECODING
    else:
        document, columns = _of_device(parsed, settings), _DEVICE
    if parsed.output:
        parsed.output.write_text(report.in_json(document) + "\n", encoding="utf-8")
    if parsed.plot:
        draw(charts(document), parsed.plot)
    report.show_or_print(document, partial(show, columns=columns), as_json=parsed.json)
    return 1 if not document["results"] or any(row.get("errors") for row in document["results"]) else 0


def _of_device(parsed: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    with telling(f"opening {parsed.model}"):
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

    protocol: Protocol = parsed.protocol or ("grpc" if parsed.url.startswith("grpc://") else "predict")
    connections = numbers(parsed.connections, "--connections", int) if parsed.connections else []
    rates = numbers(parsed.rates, "--rates", float) if parsed.rates else []
    rows = []
    with progress(quiet=parsed.json) as bars:
        task = bars.add_task(f"{protocol} at {parsed.url}", total=len(connections) + len(rates))
        service = LoadedService(
            parsed.url.rstrip("/"),
            parsed.model,
            protocol,
            _image(parsed),
            batch=parsed.batch,
            binary=not parsed.json_tensors,
            key=parsed.key,
        )
        service.warm_up()
        for count in connections:
            rows.append(service.closed(count, parsed.seconds))
            bars.advance(task)
        for rate in rates:
            rows.append(service.open(rate, parsed.seconds, parsed.timeout_ms / 1e3))
            bars.advance(task)
    return {**_document("service", parsed.model, rows), "url": parsed.url}


def _of_decoding(parsed: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    from anychip_tools.benchmark.device_sweep import decoding
    from anychip_tools.subjects import open_named
    from backends import host
    from models import PixelModel

    model = open_named(parsed.model, settings)
    if not isinstance(model, PixelModel):
        raise CommandError(f"{model.name} takes tensors, so there is nothing to decode")
    threads = sorted({1, *(2**power for power in range(8) if 2**power <= host.core_count()), host.core_count()})
    return _document("decoding", model.name, decoding(model, _image(parsed), threads, parsed.seconds))


def _document(kind: str, model: str, results: list[dict[str, Any]], *device: str) -> dict[str, Any]:
    measured = {"simulated": False, "results": results, "refusals": {}, "environment": report.environment(*device)}
    return {"kind": kind, "model": model, **measured}


def _image(parsed: argparse.Namespace) -> bytes:
    from app.precision.probes import probe_files

    return bytes(parsed.image.read_bytes()) if parsed.image else probe_files()[0]


def _compared(parsed: argparse.Namespace) -> int:
    from anychip_tools.benchmark.comparison import compare

    before, after = parsed.compare
    changes, differing = compare(before, after, parsed.tolerance)
    found = {"changes": changes, "environments_differ_in": differing}
    report.show_or_print(found, _show_changes, as_json=parsed.json)
    return 1 if any(each["slower"] for each in changes) else 0


def _show_changes(found: Mapping[str, Any]) -> None:
    console = report.console()
    for line in found["environments_differ_in"]:
        console.print(f"not the same: {line}", soft_wrap=True)
    rows = [
        (
            *(each[name] for name in ("row", "figure", "before", "after")),
            f"{each['better'] - 1:+.1%}",
            "slower" if each["slower"] else "",
        )
        for each in found["changes"]
    ]
    console.print(report.table("", ("row", "figure", "before", "after", "better by", ""), rows))


def show(document: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Print the results in the terminal."""
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


def charts(document: Mapping[str, Any]) -> list[Chart]:
    """Chart throughput and latency over the batch size, the threads or the load."""
    rows, model = document["results"], document["model"]
    names: tuple[str, ...]
    if document["kind"] == "device":
        x_label, key, names = "batch size", "batch_size", ("engine", "precision")
    elif document["kind"] == "decoding":
        x_label, key, names = "threads", "threads", ()
    else:
        open_rows = [row for row in rows if row["mode"] == "open"]
        rows = open_rows or rows
        x_label, key = ("requests a second", "rate") if open_rows else ("connections", "connections")
        names = ("protocol",)
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(" ".join(str(row[name]) for name in names) or model, []).append(row)

    def drawn(figure: str) -> dict[str, list[tuple[float, float]]]:
        return {name: [(float(row[key]), row[figure]) for row in each] for name, each in lines.items()}

    latency = {
        f"{name}, {figure[:3]}": points for figure in ("p50_ms", "p99_ms") for name, points in drawn(figure).items()
    }
    return [
        Chart(f"{model}: throughput", x_label, "images a second", drawn("images_per_s")),
        Chart(f"{model}: latency", x_label, "milliseconds", latency),
    ]
