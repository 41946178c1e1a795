"""Make a row of docs/hardware.md, in both languages, of the file that somebody sent.

    python -m benchmarks.hardware_row anychip-card.json

The file is of `anychip report`; it comes from strangers: nothing of it is taken over but what fits VerifyReport, and
names lose what Markdown or HTML reads as more than a name. Read what was written before it is committed.

Owns: the form of a row. The report itself is stored as `anychip verify` writes it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anychip_tools.verify.report import Finding, Part, VerifyReport

DOCS = Path(__file__).resolve().parents[1] / "docs"
_PAGES = {
    "hardware.md": ("| device | date |", ", ", "{} ({})", {}, "{} checks left out"),
    "hardware.zh-CN.md": (
        "| 设备 | 日期 |",
        "，",  # noqa: RUF001
        "{}（{}）",  # noqa: RUF001
        {"passed": "通过", "FAILED": "失败", "not passed": "未通过"},
        "略去 {} 项检查",
    ),
}
"""Of each page: the beginning of its table, a comma, brackets, the verdicts and the note."""
_LEFT_OUT = ("anychip", "cuda", "torchvision", "onnxruntime")
_TOOLKITS = {"cann": "CANN", "rocm": "ROCm", "dtk": "DTK", "neuware": "Neuware", "supa": "SUPA", "musa": "MUSA"}
"""Toolkits as their vendors write them. Another vendor's toolkit, and a package, has its own name."""


class NoReportError(Exception):
    """The file makes no row; the message is one sentence."""


def main(arguments: list[str] | None = None) -> None:
    """Write the row and the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="of anychip report")
    parser.add_argument("--docs", type=Path, default=DOCS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        print(add(given.file, given.docs))
    except NoReportError as error:
        sys.exit(f"{given.file}: {error}")


def add(file: Path, docs: Path = DOCS) -> str:
    """Write the row of this file into both pages, and its report; return what was written. Raises NoReportError."""
    report, versions = read(file)
    backend = _word(report.device.partition(":")[0])
    name = _word(report.device_name)
    stored = f"{backend}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
    statuses = [finding.status for part in report.parts for finding in part.findings]
    skipped = statuses.count("SKIP")
    written = {}
    for page, (head, comma, brackets, verdicts, note) in _PAGES.items():
        lines = (docs / page).read_text(encoding="utf-8").splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
        end = next(number for number in range(first, len(lines) + 1) if not "".join(lines[number : number + 1]))
        device = brackets.format(name, f"`{backend}`")
        old = next((n for n in range(first, end) if lines[n].startswith((f"| {name} |", f"| {device} |"))), None)
        if old is not None and (link := re.search(r"\(reports/([\w-]+)\.md\)", lines[old])):
            stored = link[1]
        verdict = verdicts.get(report.verdict, report.verdict)
        software = comma.join(_software(report.about, versions))
        cells = (device, _word(report.date), software, f"[{verdict}](reports/{stored}.md)", note.format(skipped))
        row = "| " + " | ".join(cells) + " |"
        lines[slice(end, end) if old is None else slice(old, old + 1)] = [row]
        written[page] = "\n".join(lines) + "\n"
    kept = docs / "reports" / f"{stored}.json"
    parts = json.loads(kept.read_text(encoding="utf-8"))["parts"] if kept.exists() else []
    more = sum(finding["status"] != "SKIP" for part in parts for finding in part["findings"])
    if more > (ran := len(statuses) - skipped):
        raise NoReportError(
            f"{kept.name} has {more} checks that ran, and this one {ran}: remove it first to replace it."
        )
    for page, text in written.items():
        (docs / page).write_text(text, encoding="utf-8")
    kept.write_text(report.json(), encoding="utf-8")
    (docs / "reports" / f"{stored}.md").write_text(report.markdown(), encoding="utf-8")
    return f"{'replaced' if old is not None else 'added'} {name} in {' and '.join(_PAGES)}; reports/{stored}.json, .md"


def read(file: Path) -> tuple[VerifyReport, Mapping[str, str]]:
    """Read verify's report and the versions. Raises NoReportError."""
    try:
        sent = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoReportError(f"it cannot be read as JSON ({error}).") from None
    if not isinstance(sent, dict) or not {"doctor", "devices", "versions", "verify"} <= sent.keys():
        raise NoReportError("it is no file of anychip report.")
    if not isinstance(sent["verify"], dict):
        raise NoReportError("it has no report of anychip verify; ask for one and for the file once more.")
    try:
        return _report(dict(sent["verify"])), {str(name): str(value) for name, value in sent["versions"].items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise NoReportError(f"its report is not in the form of anychip verify ({error}).") from None


def _report(found: dict[str, Any]) -> VerifyReport:
    found.pop("passed")
    parts = [
        Part(str(part["name"]), [Finding(**finding) for finding in part["findings"]], float(part["seconds"]))
        for part in found.pop("parts")
    ]
    report = VerifyReport(**found, parts=parts)
    if not (_word(report.device) and _word(report.device_name)) or not re.fullmatch(r"\d{4}-\d\d-\d\d", report.date):
        raise ValueError("device or date is missing")
    if "simulated" in report.about:
        raise ValueError("its device is simulated")
    report.markdown()  # Fails here, and not when half is written.
    return report


def _software(about: Mapping[str, str], versions: Mapping[str, str]) -> list[str]:
    """Return torch, the vendor's packages, its toolkit and its driver, each with its version."""
    found = [f"{name} {value}" for name, value in about.items() if name in versions and name not in _LEFT_OUT]
    others = {name: versions[name] for name in versions if name not in (*about, *_LEFT_OUT)}
    drivers = [name for name in others if name.startswith("driver:")]
    found += [f"{_TOOLKITS.get(name, name)} {value}" for name, value in others.items() if name not in drivers]
    found += [f"driver {others[name]}" for name in drivers]
    return [_word(each) for each in found]


def _word(text: str) -> str:
    return " ".join(re.sub(r"[^\w.+()/: -]", " ", str(text)).split())[:100]


if __name__ == "__main__":
    main()
