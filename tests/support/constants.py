"""`anychip` with other values for some constants of the product, which are no settings: short limits for short tests.

    python -m tests.support.constants app.fleet.plans._HEARTBEAT_TIMEOUT_S=2 -- serve --device null

They hold in the server and in its forks. With `guard=FILE` the loop has a guard (tests/support/loop_guard.py).
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import loop_guard

Constants = Mapping[str, float]
"""Values by the name of a module's constant, or of a class's."""

HEARTBEAT_TIMEOUT_S = "app.fleet.plans._HEARTBEAT_TIMEOUT_S"
GUARD_COOLDOWN_S = "app.worker.memory.Guard.cooldown_s"
HANDOVER_INTERVAL_S = "app.fleet.handover._HANDOVER_INTERVAL_S"
DECODE_TIMEOUT_S = "app.serving.service._DECODE_TIMEOUT_S"
HEADER_TIMEOUT_S = "app.http.connection._HEAD_TIMEOUT_S"
LEAST_UPLOAD_BYTES_PER_S = "app.http.call._LEAST_UPLOAD_BYTES_PER_S"
MAX_TIMEOUT_S = "app.protocols.parameters._MAX_TIMEOUT_S"
CHANGES_PER_MINUTE = "app.serving.administration._CHANGES_PER_MINUTE"


_GUARD = "guard="


def words(constants: Constants, guard: Path | None = None) -> list[str]:
    """Return Python's arguments before those of `anychip`. `guard`: the file that the event loop's guard writes."""
    given = [f"{name}={value!r}" for name, value in constants.items()]
    given += [f"{_GUARD}{guard}"] * (guard is not None)
    return ["-m", "tests.support.constants", *given, "--"] if given else ["-m", "app"]


def _set(path: str, value: object) -> None:
    names = path.split(".")
    first = next(number for number, name in enumerate(names) if name.startswith("_") or name[0].isupper())
    owner: Any = importlib.import_module(".".join(names[:first]))
    for name in names[first:-1]:
        owner = getattr(owner, name)
    assert hasattr(owner, names[-1]), f"there is no {path}"
    setattr(owner, names[-1], value)


def main(arguments: Sequence[str]) -> int:
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # As `anychip` does.
    from app import cli
    from app.prepared import prepared

    end = arguments.index("--")
    for each in arguments[:end]:
        path, _, value = each.partition("=")
        if each.startswith(_GUARD):
            loop_guard.install(Path(value))
        else:
            _set(path, ast.literal_eval(value))
    given = arguments[end + 1 :]
    with prepared(given):
        return cli.main(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
