"""`anychip validate`: comparison of a device's answers with the network's, and the first layer that differs.

Owns: the options, and how it is shown. Must not import torch at its head: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anychip_tools import report
from anychip_tools.charts import Chart, draw, plot_file
from anychip_tools.options import DEVICE_SETTINGS
from anychip_tools.report import progress
from app.arguments import CommandError, add_settings, read_settings
from app.config import Settings, split
from app.telling import telling

if TYPE_CHECKING:
    from anychip_tools.validation.labels import Labelled
    from anychip_tools.validation.whole import Comparison, Depth
    from backends import Executable
    from models import Model

TEXT = "Whether a device computes what the network says, and from which layer on not."
EXAMPLE = "anychip validate yolov8n --precisions fp32,bf16"
_COLUMNS = ("engine", "precision", "verdict", "max", "mean", "relative", "cosine", "within", "agreement", "accuracy")
_WORST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "model", metavar="MODEL", help="a name, name=architecture:weights, or a file (.onnx, .pt2, .ts)"
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="images to compare on (default: those of anychip)")
    parser.add_argument("--limit", type=int, default=16, help="at most so many of them (default: %(default)s)")
    parser.add_argument("--reference", default="", metavar="MODEL", help="who is right, in place of MODEL in float32")
    parser.add_argument("--engines", default="", help="engines to compare, by commas (default: the device's, in order)")
    parser.add_argument("--precisions", default="", help="precisions to compare (default: the device's)")
    parser.add_argument("--labels", type=Path, metavar="DIR", help="labelled images, a folder for each class")
    parser.add_argument("--coco", type=Path, metavar="FILE", help="labels in COCO's JSON, of the images in --images")
    parser.add_argument("--no-layers", action="store_true", help="leave out the comparison layer by layer")
    parser.add_argument("--no-cut", action="store_true", help="do not look for the layer of an engine that differs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="draw the error by depth there, as SVG")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(parser, DEVICE_SETTINGS)


def run(parsed: argparse.Namespace) -> int:
    """Return 0 if everything that was not refused agrees. Raises CommandError, ModelError, BackendError."""
    settings = read_settings(parsed)
    if parsed.coco and not parsed.images:
        raise CommandError("--coco needs --images: the folder of the files that it names")
    document, depths = validate(parsed, settings)
    text = markdown(document)
    if parsed.markdown:
        parsed.markdown.write_text(text, encoding="utf-8")
    if parsed.plot:
        draw(charts(document["model"], depths), parsed.plot)
    report.show_or_print(document, show, as_json=parsed.json)
    return 1 if document["problems"] else 0


def validate(parsed: argparse.Namespace, settings: Settings) -> tuple[dict[str, Any], list[Depth]]:
    """Compare engines, precisions and layers; return the report and the depths for the plot."""
    with telling(f"opening {parsed.model}"):
        from anychip_tools.subjects import open_all, open_device, precisions_of
        from anychip_tools.validation.whole import Validation
        from app.precision.probes import calibration

        model, *others = open_all([each for each in (parsed.model, parsed.reference) if each], settings)
    reference = others[0] if others else None
    if reference is not None and reference.input_shape != model.input_shape:
        raise CommandError(f"{reference.name} takes other inputs than {model.name}: they cannot be compared")
    with telling("looking for devices"):
        choice, device = open_device(settings)
    facts = choice.backend.facts
    if not facts.computes:
        raise CommandError(f"{device} computes nothing, so there is nothing to compare")
    named = choice.device(device)
    default = precisions_of(model, settings, choice)
    # A simulated device computes on the CPU: half precision takes minutes on a CPU without units for it.
    precisions = split(parsed.precisions) or ((named.auto_precision,) if choice.simulated else tuple(reversed(default)))
    engines = split(parsed.engines) or (("eager",) if choice.simulated else facts.engines)
    items = _items(model, parsed)
    pairs = [(engine, precision) for precision in precisions for engine in dict.fromkeys(engines)]
    comparisons: list[Comparison] = []
    depths: list[Depth] = []
    accuracy = _accuracy(model, parsed)
    with tempfile.TemporaryDirectory(prefix="anychip-") as folder, progress(quiet=parsed.json) as bars:
        floats = () if parsed.no_layers else tuple(each for each in precisions if each != "int8")
        task = bars.add_task("comparing", total=len(pairs) + len(floats))
        validation = Validation(
            model,
            choice.backend,
            device,
            items,
            folder=Path(folder),
            calibration=calibration(model, settings.calibrate) if "int8" in precisions else None,
            reference=reference,
        )
        seen: set[tuple[str, str]] = set()
        for engine, precision in pairs:
            bars.update(task, description=f"{engine} {precision}")
            found = validation.compared(engine, precision, accuracy=accuracy, cut=not parsed.no_cut)
            if (found.engine, precision) not in seen:
                seen.add((found.engine, precision))
                comparisons.append(found)
            bars.advance(task)
        for precision in floats:
            bars.update(task, description=f"layers in {precision}")
            depths.append(validation.depth(precision))
            bars.advance(task)
    document = {
        "model": model.name,
        "task": model.task,
        "first_read": getattr(model, "witness", ""),
        "device": device,
        "simulated": choice.simulated,
        **_findings_of(comparisons, depths),
        "environment": report.environment(device, named.name),
    }
    return document, depths


def _items(model: Model, parsed: argparse.Namespace) -> Any:
    import numpy as np

    from anychip_tools.validation.labels import found_in
    from app.precision.probes import probes, seen, spread
    from models import PixelModel

    if not parsed.images:
        return probes(model)
    if not isinstance(model, PixelModel):
        raise CommandError(f"{model.name} takes tensors and no images; put items into a .probes.npz beside it")
    files = spread(found_in(parsed.images), parsed.limit)
    return np.stack([seen(model, path.read_bytes())[0] for path in files])


def _accuracy(model: Model, parsed: argparse.Namespace) -> Callable[[Executable], dict[str, float]] | None:
    from anychip_tools.validation import labels
    from models import PixelModel

    if not parsed.labels and not parsed.coco:
        return None
    if not isinstance(model, PixelModel) or model.finds != ("classes" if parsed.labels else "objects"):
        raise CommandError("--labels are for image classifiers, --coco for detectors")
    found: Sequence[Labelled]
    if parsed.labels:
        found = labels.by_folder(parsed.labels, model.labels)
    else:
        found = labels.of_coco(parsed.coco, parsed.images, model.labels)
    return lambda executable: labels.measured_accuracy(model, executable, found)


def _findings_of(comparisons: Sequence[Comparison], depths: Sequence[Depth]) -> dict[str, Any]:
    problems = [
        f"{each.engine} {each.precision}: {each.reason}" for each in comparisons if each.verdict == "differs"
    ] + [f"{each.first.layer.title} in {each.precision} differs by itself" for each in depths if each.first]
    if comparisons and all(each.verdict == "refused" for each in comparisons):
        problems.append("every engine refuses the network")
    return {
        "problems": problems,
        "comparisons": [
            {**asdict(each), "culprit": None if each.culprit is None else each.culprit.title} for each in comparisons
        ],
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
        agreement = ", ".join(f"{name} {value:.3g}" for name, value in each["agreement"].items())
        cells = [each["engine"], each["precision"], each["verdict"], *numbers]
        # One column for all precisions, so that they stand side by side.
        accuracy = ", ".join(f"{key} {value:.4g}" for key, value in each["accuracy"].items())
        rows.append([*cells, None if within is None else f"{within:.2%}", agreement, accuracy])
    return rows


def _findings(document: dict[str, Any]) -> list[str]:
    lines = [f"when it was first read: {document['first_read']}"] if document["first_read"] else []
    for each in document["comparisons"]:
        name = f"{each['engine']} in {each['precision']}"
        if each["verdict"] != "agrees":
            lines.append(f"{name} {'differs' if each['verdict'] == 'differs' else 'refuses'}: {each['reason']}")
        if each["culprit"]:
            lines.append(f"{name} is wrong from {each['culprit']} on")
        if each["cut_note"]:
            lines.append(f"{name}: {each['cut_note'].strip()}")
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


def _worst_rows(document: dict[str, Any]) -> list[list[report.Cell]]:
    return [
        [each["precision"], one["layer"], one["alone"], one["sum"]]
        for each in document["layers"]
        for one in each["worst"]
    ]


def show(document: dict[str, Any]) -> None:
    """Print the report in the terminal."""
    console = report.console()
    simulated = " (simulated)" if document["simulated"] else ""
    console.print(f"{document['model']} on {document['device']}{simulated} against float32 on the CPU")
    console.print(report.table("", _COLUMNS, _rows(document)))
    for line in _findings(document):
        console.print(line, soft_wrap=True)
    if worst := _worst_rows(document):
        console.print(report.table("\nlayers with the largest error", ("precision", "layer", "alone", "sum"), worst))


def markdown(document: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    head = f"# {document['model']} on {document['device']} against float32 on the CPU\n\n"
    environment = "".join(f"- {name}: {value}\n" for name, value in document["environment"].items() if value != "")
    findings = "".join(f"- {line}\n" for line in _findings(document))
    layers = report.markdown_table(("precision", "layer", "alone", "sum"), _worst_rows(document))
    parts = [head + environment, report.markdown_table(*report.used(_COLUMNS, _rows(document))), findings]
    return "\n".join([*parts, "## Layers with the largest error\n", layers] if document["layers"] else parts)


def charts(model: str, depths: Sequence[Depth]) -> list[Chart]:
    """Chart the error over depth: each layer alone, and all layers up to it."""
    series: dict[str, list[tuple[float, float]]] = {}
    for each in depths:
        if each.layers:
            alone = [(float(number), one.alone.relative) for number, one in enumerate(each.layers)]
            total = [(float(number), one.sum.relative) for number, one in enumerate(each.layers)]
            series |= {f"{each.precision}, layer alone": alone, f"{each.precision}, sum": total}
    marks = {
        f"{each.precision}: {each.first.layer.title}": float(each.layers.index(each.first))
        for each in depths
        if each.first
    }
    title = f"{model}: relative error by depth"
    return [Chart(title, "layer", "relative error", series, log_y=True, marks=marks)]
