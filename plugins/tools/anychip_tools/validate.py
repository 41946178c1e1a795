"""`anychip validate`: comparison of a device's answers with the network's, and the first layer that differs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anychip_tools import report
from anychip_tools.options import DEVICE_SETTINGS
from anychip_tools.report import progress
from app.arguments import CommandError, add_settings, read_settings
from app.config import Settings
from app.config.values import split
from app.telling import say

if TYPE_CHECKING:
    from anychip_tools.validation.whole import Comparison, Depth
    from models import Model

TEXT = "Whether a device computes what the network says, and from which layer on not."
EXAMPLE = "anychip validate yolov8n --precisions fp32,bf16"
_COLUMNS = ("engine", "precision", "verdict", "max", "mean", "relative", "cosine", "within")
_WORST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name, name=architecture:weights, or a file (.onnx, .pt2, .ts)")
    add("--images", type=Path, metavar="DIR", help="images to compare on (default: those of anychip)")
    add("--limit", type=int, default=16, help="at most so many of them (default: %(default)s)")
    add("--engines", default="", help="engines to compare, by commas (default: the device's, in order)")
    add("--precisions", default="", help="precisions to compare (default: the device's)")
    add("--no-layers", action="store_true", help="leave out the comparison layer by layer")
    add("--json", action="store_true", help="print JSON")
    add_settings(parser, DEVICE_SETTINGS)


def run(parsed: argparse.Namespace) -> int:
    """Return 0 if everything that was not refused agrees. Raises CommandError, ModelError, BackendError."""
    document = validate(parsed, read_settings(parsed))
    report.show_or_print(document, show, as_json=parsed.json)
    return 1 if document["problems"] else 0


def validate(parsed: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Compare engines, precisions and layers; return the report."""
    say(f"opening {parsed.model}")
    from anychip_tools.subjects import open_device, open_named, precisions_of
    from anychip_tools.validation.whole import Validation
    from app.precision.probes import calibration

    model = open_named(parsed.model, settings)
    say("looking for devices")
    choice, device = open_device(settings)
    facts = choice.backend.facts
    if not facts.computes:
        raise CommandError(f"{device} computes nothing, so there is nothing to compare")
    named = choice.device(device)
    default = precisions_of(settings, choice)
    # A simulated device computes on the CPU: half precision takes minutes on a CPU without units for it.
    precisions = split(parsed.precisions) or ((named.auto_precision,) if choice.simulated else tuple(reversed(default)))
    engines = split(parsed.engines) or (("eager",) if choice.simulated else facts.engines)
    items = _items(model, parsed)
    pairs = [(engine, precision) for precision in precisions for engine in dict.fromkeys(engines)]
    comparisons: list[Comparison] = []
    depths: list[Depth] = []
    with progress(quiet=parsed.json) as bars:
        floats = () if parsed.no_layers else tuple(each for each in precisions if each != "int8")
        task = bars.add_task("comparing", total=len(pairs) + len(floats))
        validation = Validation(
            model,
            choice.backend,
            device,
            items,
            calibration=calibration(model, settings.calibrate) if "int8" in precisions else None,
        )
        seen: set[tuple[str, str]] = set()
        for engine, precision in pairs:
            bars.update(task, description=f"{engine} {precision}")
            found = validation.compared(engine, precision)
            if (found.engine, precision) not in seen:
                seen.add((found.engine, precision))
                comparisons.append(found)
            bars.advance(task)
        for precision in floats:
            bars.update(task, description=f"layers in {precision}")
            depths.append(validation.depth(precision))
            bars.advance(task)
    return {
        "model": model.name,
        "task": model.task,
        "first_read": getattr(model, "witness", ""),
        "device": device,
        "simulated": choice.simulated,
        **_findings_of(comparisons, depths),
        "environment": report.environment(device, named.name),
    }


def _items(model: Model, parsed: argparse.Namespace) -> Any:
    import numpy as np

    from app.precision.probes import images_in, probes, seen, spread
    from models import PixelModel

    if not parsed.images:
        return probes(model)
    if not isinstance(model, PixelModel):
        raise CommandError(f"{model.name} takes tensors and no images")
    files = spread(images_in(parsed.images), parsed.limit)
    if not files:
        raise CommandError(f"there is no image in {parsed.images}")
    return np.stack([seen(model, path.read_bytes())[0] for path in files])


def _findings_of(comparisons: Sequence[Comparison], depths: Sequence[Depth]) -> dict[str, Any]:
    problems = [
        f"{each.engine} {each.precision}: {each.reason}" for each in comparisons if each.verdict == "differs"
    ] + [f"{each.first.layer.title} in {each.precision} differs by itself" for each in depths if each.first]
    if comparisons and all(each.verdict == "refused" for each in comparisons):
        problems.append("every engine refuses the network")
    return {
        "problems": problems,
        "comparisons": [asdict(each) for each in comparisons],
        "layers": [
            {
                "precision": each.precision,
                "limit": each.limit,
                "note": each.note,
                "count": len(each.layers),
                "first_divergent": None if each.first is None else each.first.layer.title,
                "worst": [
                    {"layer": one.layer.title, "alone": one.alone.relative, "sum": one.sum.relative}
                    for one in sorted(each.layers, key=lambda one: -one.alone.relative)[:_WORST]
                    if one.alone.relative
                ],
            }
            for each in depths
        ],
    }


def _rows(document: dict[str, Any]) -> list[list[report.Cell]]:
    rows: list[list[report.Cell]] = []
    for each in document["comparisons"]:
        whole = each["whole"] or {}
        numbers = [whole.get(name) for name in ("max_abs", "mean_abs", "relative", "cosine")]
        within = whole.get("within")
        cells = [each["engine"], each["precision"], each["verdict"], *numbers]
        rows.append([*cells, None if within is None else f"{within:.2%}"])
    return rows


def _findings(document: dict[str, Any]) -> list[str]:
    lines = [f"when it was first read: {document['first_read']}"] if document["first_read"] else []
    for each in document["comparisons"]:
        name = f"{each['engine']} in {each['precision']}"
        if each["verdict"] != "agrees":
            lines.append(f"{name} {'differs' if each['verdict'] == 'differs' else 'refuses'}: {each['reason']}")
    for each in document["layers"]:
        if each["first_divergent"]:
            lines.append(f"first layer that diverges in {each['precision']}: {each['first_divergent']}")
        elif each["count"]:
            lines.append(
                f"layer by layer in {each['precision']}: all {each['count']} within {each['limit']:g} by themselves"
            )
        if each["note"]:
            lines.append(f"{each['precision']}: {each['note']}")
    return lines


def show(document: dict[str, Any]) -> None:
    """Print the report in the terminal."""
    console = report.console()
    simulated = " (simulated)" if document["simulated"] else ""
    console.print(f"{document['model']} on {document['device']}{simulated} against float32 on the CPU")
    console.print(report.table("", _COLUMNS, _rows(document)))
    for line in _findings(document):
        console.print(line, soft_wrap=True)
    layers = [(each["precision"], one) for each in document["layers"] for one in each["worst"]]
    if worst := [[name, one["layer"], one["alone"], one["sum"]] for name, one in layers]:
        console.print(report.table("\nlayers with the largest error", ("precision", "layer", "alone", "sum"), worst))
