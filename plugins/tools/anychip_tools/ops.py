"""`anychip ops`: operators of a network that a device has, replacements for the others, and remedies."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from anychip_tools import report
from anychip_tools.options import DEVICE_SETTINGS
from anychip_tools.remedies import STEPS, of_operator
from app.arguments import CommandError, add_settings, read_settings
from app.telling import say

if TYPE_CHECKING:
    from anychip_tools.record import OperatorRecord
    from app.config import Settings
    from models import Model

TEXT = "Which operators of a network a device has, and what to do about others."
EXAMPLE = "anychip ops yolov8n --device npu"
_WORDS = {
    "native": "native",
    "vendor-cpu": "CPU, by the vendor",
    "cpu": "CPU",
    "refused": "refuses the type",
    "failed": "failed",
    "composite": "made of others",
    "converted": "converted",
    "unconverted": "not converted",
    "missing": "missing",
}
# With these, vendors report their silent fallbacks or leave them to us (docs/operators.md has the sources).
_SPOKEN_FALLBACKS = {
    "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
    "ENABLE_FALLBACK_TO_CPU": "0",
    "PYTORCH_DEBUG_XPU_FALLBACK": "1",
}
_GOOD = ("native", "composite", "converted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name, name=architecture:weights, or a file (.onnx, .pt2, .ts)")
    add(
        "--against",
        metavar="TABLE",
        help="predict from a vendor's list of operators, without the device: npu, mlu, musa, cuda, tensorrt, torchair",
    )
    add("--batch-size", type=int, default=1, help="items in the batch (default: %(default)s)")
    add("--runs", type=int, default=3, help="timed runs after the first (default: %(default)s)")
    add("--all", action="store_true", help="list every operator, and not only the ten slowest")
    add("--json", action="store_true", help="print JSON")
    add_settings(parser, (*DEVICE_SETTINGS, "precision"))


def run(parsed: argparse.Namespace) -> int:
    """Return 0 if every operator runs on the device, 1 if one does not. Raises CommandError, BackendError."""
    if parsed.batch_size < 1 or parsed.runs < 1:
        raise CommandError("--batch-size and --runs must be 1 or more")
    for name, value in _SPOKEN_FALLBACKS.items():  # Before any import; the environment wins.
        os.environ.setdefault(name, value)
    settings = read_settings(parsed)
    say(f"operators of {parsed.model}")
    from anychip_tools.subjects import open_named

    model = open_named(parsed.model, settings)
    found = predicted(model, parsed) if parsed.against else recorded(model, settings, parsed)
    report.show_or_print(found, partial(show, every=parsed.all), as_json=parsed.json)
    return 1 if any(row["problem"] for row in found["operators"]) else 0


def recorded(model: Model, settings: Settings, parsed: argparse.Namespace) -> dict[str, Any]:
    """Run the network on the device and report its operators."""
    from anychip_tools.record import record
    from anychip_tools.subjects import in_pytorch, inputs_of, open_device

    choice, device = open_device(settings)
    if not choice.backend.facts.computes:
        raise CommandError(f"{device} computes nothing, so there are no operators to see")
    named = choice.device(device)
    precision = named.auto_precision if settings.precision == "auto" else settings.precision
    if precision == "int8":
        raise CommandError("operators are recorded in fp32, fp16 or bf16; int8 is the business of single engines")
    inputs = (inputs_of(model, parsed.batch_size),)
    operators = record(choice.backend, in_pytorch(model), device, precision, inputs, runs=parsed.runs)
    total_s = sum(each.seconds for each in operators) or 1.0
    device_type = choice.backend.facts.device_type
    rows = [_row(each, device_type, each.how, each.reason, share=each.seconds / total_s) for each in operators]
    about = {"device_name": named.name, "simulated": choice.simulated, "precision": precision}
    return _document(model, rows, device, **about)


def predicted(model: Model, parsed: argparse.Namespace) -> dict[str, Any]:
    """Predict the report from a vendor's list of operators, without the device."""
    from anychip_tools.operator_tables import table
    from anychip_tools.record import is_composite, names_of
    from anychip_tools.subjects import in_pytorch, inputs_of

    try:
        expected = table(parsed.against)
    except KeyError as error:
        raise CommandError(str(error.args[0])) from None
    as_traced = expected.kind == "converters"
    rows = []
    for each in names_of(in_pytorch(model), (inputs_of(model, parsed.batch_size),), as_traced=as_traced):
        how, reason = "missing", f"it is not in the list of {expected.name}"
        if expected.has(each.name):
            how, reason = ("native" if expected.kind == "kernels" else "converted"), ""
        elif expected.kind == "converters":
            how, reason = "unconverted", f"{expected.name} cuts the network here, and PyTorch computes it"
        elif is_composite(each.name):
            how, reason = "composite", ""
        rows.append(_row(each, expected.name, how, reason))
    return _document(model, rows, parsed.against, prediction=True, source=expected.source)


def _row(
    operator: OperatorRecord, device_type: str, how: str, reason: str, *, share: float | None = None
) -> dict[str, Any]:
    is_problem = how not in _GOOD
    return {
        "operator": operator.name,
        "how": how,
        "calls": operator.calls,
        "share": share,
        "reason": reason,
        "remedies": [each._asdict() for each in of_operator(operator.name, device_type, how)] if is_problem else [],
        "problem": is_problem,
    }


def _document(model: Model, rows: Sequence[Mapping[str, Any]], device: str, **about: Any) -> dict[str, Any]:
    calls = sum(row["calls"] for row in rows)
    good = [row for row in rows if not row["problem"]]
    return {
        "model": model.name,
        "support_by_kind": len(good) / max(1, len(rows)),
        "support_by_calls": sum(row["calls"] for row in good) / max(1, calls),
        "calls": calls,
        "operators": rows,
        "device": device,
        "device_name": "",
        "simulated": False,
        "precision": "",
        "prediction": False,
        "source": "",
        **about,
    }


def show(found: Mapping[str, Any], *, every: bool) -> None:
    """Print the report in the terminal."""
    console = report.console()
    rows = found["operators"]
    if found["prediction"]:
        head = f"{found['model']} against the list of {found['device']}: a prediction, nothing ran there"
        console.print(f"{head}\n  list: {found['source']}")
    else:
        simulated = " (simulated: the times are the CPU's)" if found["simulated"] else ""
        console.print(f"{found['model']} on {found['device']} in {found['precision']}{simulated}")
    problems = [row for row in rows if row["problem"]]
    listed = rows if every else [*problems, *(row for row in rows if row not in problems)][: max(10, len(problems))]
    shown = [
        (row["operator"], _WORDS[row["how"]], row["calls"], "" if row["share"] is None else f"{row['share']:.1%}")
        for row in listed
    ]
    console.print(report.table("", ("operator", "runs", "calls", "share of time"), shown))
    if len(listed) < len(rows):
        console.print(f"… and {len(rows) - len(listed)} more that run on the device (--all)")
    kinds, calls = found["support_by_kind"], found["support_by_calls"]
    bad = sum(row["problem"] for row in rows)
    console.print(
        f"{len(rows) - bad} of {len(rows)} operators are supported ({kinds:.1%}), {calls:.1%} of {found['calls']} calls"
    )
    for row in problems:
        reason = f": {row['reason']}" if row["reason"] else ""
        console.print(f"\n{row['operator']}: {_WORDS[row['how']]}{reason}", soft_wrap=True)
        for number, remedy in enumerate(row["remedies"], 1):
            console.print(f"  {number}. {STEPS[remedy['step']]}: {remedy['text']}", soft_wrap=True)
