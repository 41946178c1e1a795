"""Rows of other packages' backends for `anychip doctor`, from a child process: one line of JSON on standard output.

Owns: the child and the form of a row in that line. The child imports torch, as backends do, so that the doctor need
not: a vendor's build can end the process that imports it. What packages print goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import is_dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from anychip_base.extras import entry_points
from anychip_base.interpreter import python_command
from anychip_tools.facts import rows

_TIME_LIMIT_S = 120.0  # For `import torch`, from a slow disk.


def every_row() -> dict[str, Any]:
    """Return every vendor's row here: `rows`, and those of other packages, in place of ours of the same name."""
    return {**rows(), **_outside_rows()}


@cache
def _outside_rows() -> dict[str, Any]:
    if not entry_points("anychip.backends"):
        return {}
    command = python_command("-m", "anychip_tools.outside_rows")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
        return from_json(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # Where torch cannot be imported; the check of torch tells why.
        return {}


def from_json(text: str) -> dict[str, Any]:
    """Return rows as `in_json` wrote them, by name; they have the attributes of rows. Raises ValueError."""
    given = json.loads(text, object_hook=lambda told: SimpleNamespace(**told["row"]) if "row" in told else told)
    return {each.name: each for each in given}


def in_json() -> str:
    """Return the rows. A backend that cannot be made has none: the check of devices tells why."""
    from backends.external import external_backends

    facts = [backend.facts for backend in external_backends() if backend.facts.name and backend.facts.engines]
    return json.dumps(facts, default=_encoded)


def _encoded(value: Any) -> Any:
    """Return what JSON has no form for as a dictionary: a row, a part of a row, or a mapping."""
    return {"row": vars(value)} if is_dataclass(value) else dict(value)


def main() -> None:
    """Print the rows."""
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, in_json().encode() + b"\n")
    os._exit(0)  # Vendors' exit handlers may hang or abort.


if __name__ == "__main__":
    main()
