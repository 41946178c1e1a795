"""Command of `anychip verify`: it chooses the device, runs each part in a child process, and writes the report.

Must not touch the device itself beyond detection: a driver may end the process that does.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from anychip_base.interpreter import python_command
from anychip_tools.child_service import run_group
from anychip_tools.options import numbers
from anychip_tools.report import versions
from anychip_tools.verify.report import AUTO, Finding, Part, Status, VerifyReport
from app.arguments import CommandError, add_settings, read_settings
from app.config.values import split
from app.telling import say

if TYPE_CHECKING:
    from backends import Device

TEXT = "Check and measure a device in ten minutes; writes a report to publish."
EXAMPLE = "anychip verify --device npu --out report/"
NOTHING_TO_VERIFY = 2
SAMPLED = ("resnet50", "yolov8n")
"""Networks whose weights come with anychip, so that their answers can be compared."""
_DETAILS = ("driver", "driver_version", "runtime", "cuda", "cann", "hip", "arch", "capability", "compute_capability")
_LEAST_S = 5.0
_TOOK_TOO_LONG = 124


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `anychip verify`."""
    add = parser.add_argument
    add_settings(parser, ("device", "simulate"))
    add("--models", default="resnet50,yolov8n", help="of the sample weights (default: %(default)s)")
    add("--sizes", default="1,8,64", help="batch sizes of the sweep (default: %(default)s)")
    add("--engines", default="", help="default: all of the backend")
    add("--precisions", default="", help="default: all of the backend")
    add("--seconds", type=float, default=1.0, help="length of one measurement (default: %(default)g)")
    add("--budget-s", type=float, default=600.0, help="what is not done by then is left out")
    add("--parts", default=",".join(PARTS), help="default: %(default)s")
    add("--out", type=Path, default=Path(), metavar="DIR", help="folder of the report (default: here)")
    add("--json", action="store_true", help="print the report as JSON")
    add("--part", nargs=2, default=None, metavar=("DEVICE", "WHAT"), help=argparse.SUPPRESS)


def run(parsed: argparse.Namespace) -> int:
    """Return 0: all passed; 1: something failed; 2: no such device. Raises CommandError, OSError."""
    settings = read_settings(parsed)
    from backends import simulated

    simulated.configure(settings.simulate, "", settings.cache_dir.expanduser())
    if parsed.part:
        for finding in _findings(parsed, *parsed.part):
            print(_MARK + json.dumps(asdict(finding)), flush=True)
        return 0
    if parsed.seconds <= 0 or parsed.budget_s <= 0:
        raise CommandError("--seconds and --budget-s must be more than 0")
    parts = split(parsed.parts)
    strangers = [name for name in split(parsed.models) if name not in SAMPLED]
    if strangers:
        raise CommandError(f"there are no sample weights of {strangers[0]!r}; there are of {' and '.join(SAMPLED)}")
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise CommandError(f"there is no part {unknown[0]!r}; there is {', '.join(PARTS)}")
    from backends import BackendUnavailableError, choose

    try:
        choice = choose(settings.device)
    except BackendUnavailableError as error:
        print(f"anychip: there is nothing to verify: {error}", file=sys.stderr)
        return NOTHING_TO_VERIFY
    report = _about(choice.device(choice.devices[0]), parsed.seconds, choice.simulated)
    end_s = time.monotonic() + parsed.budget_s
    for name in parts:
        part = Part(name)
        report.parts.append(part)
        began_s = time.monotonic()
        say(f"checking {name}")
        for finding in PARTS[name](parsed, report.device, end_s):
            part.findings.append(finding)
            part.seconds = round(time.monotonic() - began_s, 1)
            if not parsed.json:
                _print(part.name, finding)
            report.write(parsed.out)
    print(report.json() if parsed.json else _verdict(report, parsed.out), end="", flush=True)
    return 0 if report.passed else 1


def _about(device: Device, seconds: float, simulated: bool) -> VerifyReport:
    about = {"python": platform.python_version(), "machine": platform.machine(), **versions("anychip", "numpy")}
    about |= {name: device.details[name] for name in _DETAILS if name in device.details}
    about["memory"] = f"{device.memory_bytes / 2**30:.0f} GiB"
    about |= {"measurement": f"{seconds:g} s", **({"simulated": "yes"} if simulated else {})}
    return VerifyReport(device.id, device.name, time.strftime("%Y-%m-%d"), about)


def _doctor(parsed: argparse.Namespace, device: str, end_s: float) -> Iterator[Finding]:
    del device
    # A simulated device needs none of the vendor's software that the check looks for.
    skipped = "port,weights,compatibility" if parsed.setting_simulate else "port,weights"
    command = ["doctor", "--json", "--skip", skipped, *_shared(parsed)]
    code, printed, errors = _run(command, end_s)
    try:
        checks = json.loads(printed)
    except ValueError:
        late = code == _TOOK_TOO_LONG
        yield Finding("doctor", "SKIP" if late else "FAIL", _ended(code, printed + errors))
        return
    for check in checks:
        # A device with a warning serves.
        status: Status = {"FAIL": "FAIL", "SKIP": "SKIP"}.get(check["status"], "PASS")  # type: ignore[assignment]
        yield Finding(check["name"], status, " ".join((check["detail"], check["remedy"])).strip())


def _engines(parsed: argparse.Namespace, device: str, end_s: float) -> Iterator[Finding]:
    from anychip_tools.verify.measurements import cases
    from backends import choose

    backend = choose(device).backend
    engines = split(parsed.engines)
    for case in cases(backend, split(parsed.models), engines):
        if engines and case.engine not in engines:
            continue
        if parsed.precisions and case.engine != AUTO and case.precision not in split(parsed.precisions):
            continue
        if not backend.facts.computes:
            yield Finding(case.name, "SKIP", "this device computes nothing")
        elif end_s - time.monotonic() < _LEAST_S:
            yield Finding(case.name, "SKIP", "no time was left for it (--budget-s)")
        else:
            yield from _in_child(parsed, device, end_s, what=case.name)


def _service(parsed: argparse.Namespace, device: str, end_s: float) -> Iterator[Finding]:
    # The rest of the time, but more than nothing: people want to know whether requests are lost.
    yield from _in_child(parsed, device, max(end_s, time.monotonic() + parsed.budget_s / 2), what="service")


def _in_child(parsed: argparse.Namespace, device: str, end_s: float, *, what: str) -> Iterator[Finding]:
    command = ["verify", "--part", device, what, "--models", parsed.models, "--sizes", parsed.sizes]
    command += ["--seconds", str(parsed.seconds), *_shared(parsed)]
    given_s = end_s - time.monotonic()
    code, printed, errors = _run(command, end_s)
    for line in printed.splitlines():
        if line.startswith(_MARK):
            yield Finding(**json.loads(line.removeprefix(_MARK)))
    if code == _TOOK_TOO_LONG:  # A time limit cannot tell a device that hangs from a busy machine.
        yield Finding(what, "SKIP", f"the {given_s:.0f} s that were left did not suffice for it (--budget-s)")
    elif code:
        yield Finding(what, "FAIL", _ended(code, printed + errors))


PARTS: dict[str, Callable[[argparse.Namespace, str, float], Iterator[Finding]]] = {
    "doctor": _doctor,
    "contract": partial(_in_child, what="contract"),
    "decoding": partial(_in_child, what="decoding"),
    "service": _service,
    "engines": _engines,
}
"""Parts in order: the service before the engines, because the engines take all the time there is."""


_MARK = "anychip-finding "


def _findings(parsed: argparse.Namespace, device: str, what: str) -> Iterator[Finding]:
    from backends import choose

    models = split(parsed.models)
    choice = choose(device)
    if what == "contract":
        from anychip_tools.verify.contract import Subject, run_checks

        yield from run_checks(Subject(choice.backend, device, exact=choice.simulated), models)
    elif what == "decoding":
        from anychip_tools.verify.measurements import run_decoding

        yield from (run_decoding(choice.backend, device, name, parsed.seconds) for name in models)
    elif what == "service":
        from anychip_tools.verify.service import run_service

        yield from run_service(["--device", device, *_simulation(parsed)], models, 3 * parsed.seconds)
    else:
        from anychip_tools.verify.measurements import cases, run_case

        # Compiled anew: the cache of an earlier run is not under test.
        with tempfile.TemporaryDirectory() as folder:
            every = cases(choice.backend, models, choice.backend.facts.by_name)
            case = next(each for each in every if each.name == what)
            yield run_case(case, device, numbers(parsed.sizes, "--sizes", int), parsed.seconds, Path(folder))


def _shared(parsed: argparse.Namespace) -> list[str]:
    return ["--device", parsed.setting_device or "auto", *_simulation(parsed)]


def _simulation(parsed: argparse.Namespace) -> list[str]:
    return ["--simulate", parsed.setting_simulate] if parsed.setting_simulate else []


def _run(words: Sequence[str], end_s: float) -> tuple[int, str, str]:
    """Run an `anychip` command; return status, output and errors. At `end_s` kill it, and its children, too."""
    limit_s = max(end_s - time.monotonic(), _LEAST_S)
    try:
        return run_group(python_command("-m", "app", *map(str, words)), limit_s)
    except subprocess.TimeoutExpired as late:
        return _TOOK_TOO_LONG, str(late.output or ""), str(late.stderr or "")


def _ended(code: int, printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip() and not line.startswith(_MARK)]
    how = {_TOOK_TOO_LONG: "it took longer than there was time"}.get(code, f"it ended with {code}")
    if code < 0:
        how = f"it was ended by {signal.Signals(-code).name}"
    return f"{how}: {lines[-1][:300]}" if lines else how


def _print(part: str, finding: Finding) -> None:
    measured = ", ".join(f"{name} {value}" for name, value in finding.figures.items())
    says = "; ".join(text for text in (measured, finding.detail) if text)
    print(f"{finding.status}  {part:9} {finding.name:34} {says[:200]}", flush=True)


def _verdict(report: VerifyReport, folder: Path) -> str:
    failed = [finding.name for part in report.parts for finding in part.findings if finding.status == "FAIL"]
    where = folder / "anychip-report.md"
    unseen = f"not all was seen ({report.unseen or 'a part has found nothing'})"
    why = "" if report.passed else f": {', '.join(failed) or unseen}"
    return f"{report.device} {report.verdict}{why}; see {where}\n"
