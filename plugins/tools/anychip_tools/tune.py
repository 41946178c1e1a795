"""`anychip tune`: search for the best engine, precision, batch sizes, workers and decoders, stored for `serve`."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anychip_tools import report
from anychip_tools.options import DEVICE_SETTINGS
from anychip_tools.report import progress
from app.arguments import CommandError, add_settings, read_settings
from app.config import Settings
from app.config.values import sizes_of, split
from app.telling import say

if TYPE_CHECKING:
    from anychip_tools.tuning import Axis, Candidate, Compared, TuningOutcome
    from app.fleet.profiles import Profile
    from backends import Choice
    from models import Model

TEXT = "Find the best settings for a model here, and remember them for serve."
EXAMPLE = "anychip tune resnet50 --budget 10m --p99-ms 50"
_LADDERS = ((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32), (1, 2, 4), (1, 8), (1,), (1, 2, 4, 8, 16, 32, 64))
_UNITS = {"s": 1, "m": 60, "h": 3600}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name, name=architecture:weights, or a file")
    add("--budget", default="10m", help="time for all trials, e.g. 90s, 10m, 1h (default: %(default)s)")
    add("--p99-ms", type=float, default=inf, help="latency that 99 of 100 answers must keep")
    add("--engines", default="", help="engines to try, by commas (default: all of the device)")
    add("--precisions", default="", help="precisions to try (default: all of the device)")
    add("--seconds", type=float, default=4.0, help="length of one measurement (default: %(default)g)")
    add("--image", type=Path, help="the JPEG that is sent (default: one of anychip's)")
    add("--dry-run", action="store_true", help="do not store the profile")
    add("--json", action="store_true", help="print JSON")
    add_settings(parser, DEVICE_SETTINGS)


def run(parsed: argparse.Namespace) -> int:
    """Return 1 if no trial keeps --p99-ms. Raises CommandError (also if nothing serves), ModelError, BackendError."""
    budget_s = seconds_of(parsed.budget)
    settings = read_settings(parsed)
    say(f"opening {parsed.model}")
    from anychip_tools.subjects import open_device, open_named
    from anychip_tools.tuning import Search, Trials
    from app.fleet import profiles
    from app.precision.probes import probe_files
    from models import PixelModel

    model = open_named(parsed.model, settings)
    if not isinstance(model, PixelModel):
        raise CommandError(f"{model.name} takes tensors: tune is for models of images")
    choice, _ = open_device(settings)
    earlier = profiles.stored(settings, choice, model)
    starts = [_candidate(earlier)] if earlier else []
    options = ["--models", parsed.model, "--profiles", "false"]
    for name in DEVICE_SETTINGS:
        if value := getattr(parsed, f"setting_{name}"):
            options += [f"--{name.replace('_', '-')}", str(value)]
    image = parsed.image.read_bytes() if parsed.image else probe_files()[0]
    trials = Trials(model.name, options, image, parsed.seconds, parsed.p99_ms, len(choice.devices))
    with progress(quiet=parsed.json) as bars:
        task = bars.add_task("the defaults", total=budget_s)
        began_s = time.monotonic()

        def evaluate(candidate: Candidate) -> Any:
            ladder = ",".join(map(str, candidate.batch_sizes))
            tried = f"{candidate.engine} {candidate.precision}, {ladder}, {candidate.workers} workers"
            bars.update(task, description=tried, completed=min(budget_s, time.monotonic() - began_s))
            return trials.evaluate(candidate)

        axes = _axes(model, choice, settings, parsed)
        search = Search(axes, evaluate, budget_s=budget_s, clock=time.monotonic, p99_ms=parsed.p99_ms)
        outcome = search.run(_candidate(settings), starts)
    if outcome.best.refusal:
        raise CommandError(f"nothing serves {model.name} here: {outcome.best.refusal}")
    path = None if parsed.dry_run else _stored(outcome, settings, choice, model)
    document = _document(outcome, model.name, earlier is not None, path, parsed)
    report.show_or_print(document, show, as_json=parsed.json)
    return 0 if outcome.best.p99_ms <= parsed.p99_ms else 1


def seconds_of(text: str) -> float:
    """Read `90s`, `10m`, `1h` or a number of seconds. Raises CommandError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not found or not float(found[1]):
        raise CommandError(f"--budget {text!r} is not like 90s, 10m or 1h")
    return float(found[1]) * _UNITS.get(found[2], 1)


def _axes(model: Model, choice: Choice, settings: Settings, parsed: argparse.Namespace) -> list[Axis]:
    from anychip_tools.subjects import precisions_of
    from backends import host

    facts = choice.backend.facts
    engines = split(parsed.engines) or (*facts.engines, *facts.by_name)
    precisions = split(parsed.precisions) or precisions_of(settings, choice)
    cores = host.core_count()
    ladders = [model.batch_sizes(ladder) for ladder in _LADDERS]
    return [
        [{"engine": engine, "precision": precision} for engine in engines for precision in precisions],
        [{"batch_sizes": ladder} for ladder in dict.fromkeys(ladders)],
        [{"workers": count} for count in (2, 4) if count <= max(2, cores)],
        [{"decoders": count} for count in sorted({2, max(2, cores // 2), 2 * cores})],
    ]


def _candidate(known: Settings | Profile) -> Candidate:
    from anychip_tools.tuning import Candidate

    return Candidate(
        known.engine, known.precision, sizes_of(known.batch_sizes), known.workers_per_device, known.decoders
    )


def _stored(outcome: TuningOutcome, settings: Settings, choice: Choice, model: Model) -> Path:
    from app.fleet import profiles

    best = outcome.best
    engine, precision = best.served
    name = f"{model.name} on {choice.device(choice.devices[0]).name}, {time.strftime('%Y-%m-%d')}"
    profile = profiles.Profile(
        name,
        engine,
        precision,
        ",".join(map(str, best.candidate.batch_sizes)),
        best.candidate.decoders,
        best.candidate.workers,
        best.images_per_s,
        best.p99_ms,
        outcome.lead,
    )
    return profiles.store(profile, settings, choice, model)


def _document(
    outcome: TuningOutcome, model: str, had_profile: bool, path: Path | None, parsed: argparse.Namespace
) -> dict[str, Any]:
    return {
        "model": model,
        "p99_ms": parsed.p99_ms,
        "started_from_profile": had_profile,
        **asdict(outcome),
        "lead_over_second": outcome.lead_over_second,
        "comparison": [_compared(each) for each in outcome.comparison],
        "profile": None if path is None else str(path),
        "environment": report.environment(),
    }


def _compared(compared: Compared) -> dict[str, Any]:
    rounds = {name: [getattr(each, name) for each in compared.rounds] for name in ("images_per_s", "p99_ms")}
    return {**asdict(compared.median), "lead": compared.lead, "rounds": rounds}


_SETTINGS = ("engine", "precision", "batch sizes", "workers", "decoders")


def _settings(trial: dict[str, Any]) -> tuple[report.Cell, ...]:
    candidate, (engine, precision) = trial["candidate"], trial["served"]
    return (
        engine or candidate["engine"],
        precision or candidate["precision"],
        ",".join(map(str, candidate["batch_sizes"])),
        candidate["workers"],
        str(candidate["decoders"] or "one a core"),
    )


def _row(trial: dict[str, Any], note: str) -> Sequence[report.Cell]:
    refused = trial["refusal"]
    figures = (None,) * 3 if refused else (trial["images_per_s"], trial["p99_ms"], trial["joules_per_image"])
    return (*_settings(trial), *figures, note or (f"refused: {refused}"[:100] if refused else ""))


def _compared_row(compared: dict[str, Any], note: str) -> Sequence[report.Cell]:
    rounds = compared["rounds"]["images_per_s"]
    spread = " to ".join(report.text_of(bound) for bound in (min(rounds), max(rounds)))
    figures = (compared["images_per_s"], spread, compared["p99_ms"], compared["joules_per_image"])
    return (*_settings(compared), *figures, compared["lead"], note)


def show(document: dict[str, Any]) -> None:
    """Print the trials, the best first, then the last comparison and the stored profile."""
    console = report.console()
    default, best = document["default"]["candidate"], document["best"]["candidate"]

    def note(trial: dict[str, Any]) -> str:
        return ", ".join(word for word, each in (("best", best), ("defaults", default)) if trial["candidate"] == each)

    trials = sorted(document["trials"], key=lambda trial: (bool(trial["refusal"]), -trial["images_per_s"]))
    columns = (*_SETTINGS, "images/s", "p99 ms", "J/image", "")
    title = f"{document['model']}: {len(trials)} trials"
    console.print(report.table(title, columns, [_row(trial, note(trial)) for trial in trials]))
    if not document["complete"]:
        console.print("the budget was over before everything was tried: a longer --budget may find more")
    if document["comparison"]:
        _show_comparison(document, note)
    else:
        console.print("nothing else serves, or was tried: there is nothing to compare the best with")
    if document["best"]["p99_ms"] > document["p99_ms"]:
        console.print(f"nothing keeps {document['p99_ms']:g} ms; the best is the quickest that was tried")
    if document["profile"]:
        console.print(f"stored: {document['profile']}; anychip serve takes it up by itself", soft_wrap=True)


def _show_comparison(document: dict[str, Any], note: Callable[[dict[str, Any]], str]) -> None:
    compared = document["comparison"]
    rows = [_compared_row(each, note(each)) for each in compared]
    console, count = report.console(), len(compared[0]["rounds"]["images_per_s"])
    columns = (*_SETTINGS, "images/s", "of all rounds", "p99 ms", "J/image", "lead of the best", "")
    console.print(report.table(f"turn and turn about, rounds: {count}", columns, rows))
    over = f"{document['lead_over_second']:.2f} times as good as the second best"
    if compared[0]["candidate"] == document["default"]["candidate"]:
        console.print(f"the defaults are best: {over}")
    elif document["default"]["refusal"]:
        console.print(f"the best is {over}; the defaults do not serve")
    else:
        console.print(f"the best is {document['lead']:.2f} times as good as the defaults, and {over}")
