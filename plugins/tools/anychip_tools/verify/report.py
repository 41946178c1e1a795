"""Report of a verification: its JSON, its Markdown page, and the removal of everything that identifies the machine."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from anychip_tools.report import markdown_table

Status = Literal["PASS", "FAIL", "SKIP"]
Figure = float | str
AUTO = "auto"
"""Engine and precision of a service for which nothing is chosen."""

# A path of at least two steps; a GPU or MIG slice's UUID, whole or cut; the word behind "serial" in a vendor's text;
# the maker's name of a kernel, behind its version.
_PATH = re.compile(r"(?<![\w.:/~])~?(?:/[\w.+@~-]+){2,}/?")
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b|\b(?:GPU|MIG)-[0-9a-f]{4,}\b", re.I)
_SERIAL = re.compile(r"(serial(?: number)?\W{1,3})\w+", re.IGNORECASE)
_KERNEL = re.compile(r"(?<![\w.])(\d+\.\d+\.\d+)-[\w.+~-]+(?=: (?:no )?Landlock)")


@dataclass(frozen=True)
class Finding:
    """Result of one check. `figures`: measurements, by a name that says the unit."""

    name: str
    status: Status
    detail: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass
class Part:
    """Findings of one process. `seconds`: how long it took."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class VerifyReport:
    """Whole report. `about`: versions of software and the device's details, by name."""

    device: str
    device_name: str
    date: str
    about: Mapping[str, str]
    parts: list[Part] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if nothing failed, something passed in every part, and every case of `auto` passed."""
        found = [finding for part in self.parts for finding in part.findings]
        return (
            bool(self.parts)
            and all(any(finding.status == "PASS" for finding in part.findings) for part in self.parts)
            and not any(finding.status == "FAIL" for finding in found)
            and all(finding.status == "PASS" for finding in found if finding.name.endswith(f" {AUTO}"))
        )

    @property
    def verdict(self) -> str:
        """Verdict: passed, FAILED, or not passed. A check left out for want of time has not failed."""
        failed = any(finding.status == "FAIL" for part in self.parts for finding in part.findings)
        return "passed" if self.passed else "FAILED" if failed else "not passed"

    @property
    def unseen(self) -> str:
        """Checks that were left out, by name, with the reason; empty if none was."""
        found = [finding for part in self.parts for finding in part.findings if finding.status == "SKIP"]
        return "; ".join(f"{finding.name} ({finding.detail})" for finding in found)

    def json(self) -> str:
        """Format the report as JSON, anonymous."""
        found = {"passed": self.passed, **asdict(self)}
        return json.dumps(anonymous(found), indent=2, ensure_ascii=False) + "\n"

    def markdown(self) -> str:
        """Format the report as one page, anonymous."""
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        lines = [
            f"# {self.device_name} ({self.device.partition(':')[0]}): {self.verdict}",
            "",
            f"`anychip verify`, {self.date}. {about}.",
        ]
        if self.unseen:
            lines += ["", f"**Not seen:** {self.unseen}."]
        for part in self.parts:
            lines += ["", f"## {part.name.capitalize()} ({part.seconds:.0f} s)", "", _table(part.findings).rstrip()]
        return str(anonymous("\n".join(lines) + "\n"))

    def write(self, folder: Path) -> None:
        """Write `anychip-report.json` and `anychip-report.md` into `folder`. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "anychip-report.json").write_text(self.json(), encoding="utf-8")
        (folder / "anychip-report.md").write_text(self.markdown(), encoding="utf-8")


def _table(findings: Sequence[Finding]) -> str:
    names = list(dict.fromkeys(name for finding in findings for name in finding.figures))
    rows = [
        [
            finding.name,
            finding.status,
            *(str(finding.figures.get(name, "")) for name in names),
            finding.detail.replace("\n", " "),
        ]
        for finding in findings
    ]
    return markdown_table(["", "result", *names, "says"], rows)


def anonymous(value: object) -> object:
    """Remove hosts, the user, paths, UUIDs and serial numbers from every text."""
    if isinstance(value, str):
        home, host, text = os.path.expanduser("~"), socket.gethostname(), re.sub(r"/home/[\w.+@-]+", "~", value)
        user = os.environ.get("USER", home.rpartition("/")[2])
        for name, word in ((home, "~"), (host, "HOST"), (host.partition(".")[0], "HOST"), (user, "USER")):
            if len(name) > 3 and name not in ("root", "anychip"):  # These are words of reports, too.
                text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, text)
        text = _KERNEL.sub(r"\1", _SERIAL.sub(r"\1…", _UUID.sub("UUID", text)))
        return _PATH.sub(lambda found: "…/" + found.group().rstrip("/").rpartition("/")[2], text)
    if isinstance(value, Mapping):
        return {anonymous(name): anonymous(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [anonymous(each) for each in value]
    return value
