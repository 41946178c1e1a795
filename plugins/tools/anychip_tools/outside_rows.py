"""Child process of `anychip doctor`: the rows of other packages' backends, as one line of JSON on standard output.

Owns: the form of a row in that line. It imports torch, as backends do, so that the doctor need not: a vendor's build
can end the process that imports it. What packages print goes to standard error.
"""

from __future__ import annotations

import json
import os
from dataclasses import is_dataclass
from typing import Any


def in_json() -> str:
    """Return the rows. A backend that cannot be made has none: the check of devices tells why."""
    from backends.external import external_backends

    rows = [backend.facts for backend in external_backends() if backend.facts.name and backend.facts.engines]
    return json.dumps(rows, default=_encoded)


def _encoded(value: Any) -> Any:
    """Return what JSON has no form for as a dictionary: a row, a part of a row, or a mapping."""
    return vars(value) if is_dataclass(value) else dict(value)


def main() -> None:
    """Print the rows."""
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, in_json().encode() + b"\n")
    os._exit(0)  # Vendors' exit handlers may hang or abort.


if __name__ == "__main__":
    main()
