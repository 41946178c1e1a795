"""`anychip report`: one file about a card, to send, without names of people or machines. Must not import torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anychip_base.extras import version
from anychip_base.interpreter import python_command
from anychip_tools import doctor_vendor, facts
from anychip_tools.child_service import run_group
from anychip_tools.verify.report import AUTO, anonymous
from app.arguments import add_settings

TEXT = "Write one file about a card and its software, without secrets, to send."
EXAMPLE = "anychip report --device npu --verify report/"
_VERSION = re.compile(r"^.*\d\.\d.*$", re.MULTILINE)  # Other lines may tell who built it, and where.
_MOST_NAMES, _MOST_TEXTS, _MOST_BYTES, _LIMIT_S = 200, 20, 4096, 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `anychip report`."""
    add_settings(parser, ("device",))
    parser.add_argument("--out", type=Path, default="anychip-card.json", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--verify", type=Path, default=".", metavar="FOLDER", help="of verify's report (default: here)")


def run(parsed: argparse.Namespace) -> int:
    """Write the file. Raises OSError."""
    device = parsed.setting_device or "auto"
    try:
        verified = json.loads((parsed.verify / "anychip-report.json").read_text(encoding="utf-8"))
        if device.partition(":")[0] not in (AUTO, verified["device"].partition(":")[0]):
            raise ValueError("it is of another device")
    except (OSError, ValueError, KeyError):
        verified = f"not run; it takes ten minutes: anychip verify --device {device}; then write this file again"
    rows = facts.every_row().values()
    known = {name for row in rows for name in (f"${row.visibility_variable}", *row.machine.toolkit_folders)}
    found = {
        "about": {"made_by": "anychip report", "date": time.strftime("%Y-%m-%d"), "device": device},
        "versions": {"anychip": version(), **doctor_vendor.versions()},
        "variables": {name: os.environ[name] for name in sorted(os.environ) if f"${name}" in known},
        "doctor": _asked("doctor", "--json", "--skip", "port,weights", "--device", device),
        "devices": _asked("devices", "--json"),
        "toolkits": list(_toolkits([row.machine for row in rows])),
        "verify": verified,
    }
    parsed.out.write_text(json.dumps(anonymous(found), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{parsed.out}: read it, then send it" + (f"\nverify: {verified}" if isinstance(verified, str) else ""))
    return 0


def _asked(*words: str) -> Any:
    try:
        code, printed, errors = run_group(python_command("-m", "app", *words), _LIMIT_S)
        return json.loads(printed) if printed.startswith("[") else f"it ended with {code}: {errors[-2000:]}"
    except subprocess.TimeoutExpired:
        return f"no answer in {_LIMIT_S:g} s"


def _toolkits(machines: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the vendors' folders: names, those nearest to the top first, and the small files that hold a version."""
    drivers = {file for each in machines for file, _ in each.driver}
    telling = {"version*", *drivers, *(pattern for each in machines for pattern, _ in each.toolkit_files)}
    named = {place for each in machines for place in (*each.toolkit_folders, *each.container.mounts)} | drivers
    places = (os.environ.get(each[1:], "") if each.startswith("$") else each for each in named)
    for place in sorted({Path(each).resolve() for each in places if each}):
        folder, levels = (place.parent, [place.name]) if place.is_file() else (place, ["*", "*/*", "*/*/*"])
        paths = [path for level in levels for path in sorted(folder.glob(level))]
        small = [path for path in paths if any(map(path.match, telling)) and path.is_file()]
        small = [path for path in small if path.stat().st_size <= _MOST_BYTES][:_MOST_TEXTS]
        found = {str(path.relative_to(folder)): path.read_text("utf-8", "replace") for path in small}
        texts = {name: "\n".join(_VERSION.findall(text)) for name, text in found.items()}
        if names := [str(path.relative_to(folder)) for path in paths[:_MOST_NAMES]]:
            yield {"folder": str(folder), "names": names, "versions": texts}
