"""Faults planted in the product, each of which a test finds.

    python -m tests.support.mutations [NUMBER …]

Owns: the list, and a run of it in a copy of the tree, so that nothing is changed here. CONTRIBUTING names it; a unit
test says whether each fault can still be planted. Add one where code moves that others' answers hang on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("app", "models", "backends", "plugins", "tests", "benchmarks", "deploy", "docs", "pyproject.toml", "Makefile")
_LIMIT_S = 600


class Mutation(NamedTuple):
    """In `file`, `was`, which stands there once, becomes `becomes`; the tests of `test` then fail."""

    fault: str
    file: str
    was: str
    becomes: str
    test: str


MUTATIONS = (
    Mutation(
        "a client that leaves keeps its place in the queue",
        "app/serving/submissions.py",
        "            self._fleet.dispatcher.discard(item, error)\n",
        "            item.end(error)\n",
        "test_dispatcher.py",
    ),
    Mutation(
        "the slot of an image whose client left while it was decoded is never free again",
        "app/serving/submissions.py",
        "        if item.status is ENDED:\n            item.give_slot()\n",
        "        if item.status is ENDED:\n            pass\n",
        "test_dispatcher.py",
    ),
    Mutation(
        "a deadline that passes is answered when the worker is done",
        "app/serving/submissions.py",
        "self._withdraw(item, error, item.pool.metrics.expired)\n\n    def end",
        "pass\n\n    def end",
        "test_dispatcher.py",
    ),
    Mutation(
        "what a worker had not begun when it ended is lost",
        "app/fleet/dispatcher.py",
        "        for batch in lost.waiting:\n            self._again(batch.items, reason, suspects=False)\n",
        "",
        "test_dispatcher.py",
    ),
    Mutation(
        "the image to blame is tried for ever",
        "app/fleet/dispatcher.py",
        "elif suspects and item.attempt is ALONE and item.refill is None:",
        "elif False:",
        "test_dispatcher.py",
    ),
    Mutation(
        "what a lost batch had is not tried alone",
        "app/fleet/dispatcher.py",
        "                    item.attempt = ALONE\n",
        "                    pass\n",
        "test_dispatcher.py",
    ),
    Mutation(
        "what fills a queue counts twice",
        "app/scheduling/scheduler.py",
        "        queue.reserved -= 1\n",
        "",
        "test_scheduler.py",
    ),
    Mutation(
        "a pause is charged to the model whose image was being decoded",
        "app/decoding/pool.py",
        "taken_s = min(now_s - max(image.sent_s, decoder.heard_s), credible_s)",
        "taken_s = now_s - max(image.sent_s, decoder.heard_s)",
        "test_decode_pool.py",
    ),
    Mutation(
        "a task that was interrupted counts as cancelled for ever",
        "app/ingress/interrupt.py",
        "        task.uncancel()\n",
        "        pass\n",
        "test_interrupt.py",
    ),
    Mutation(
        "a caller may have any number of requests",
        "app/access/limits.py",
        "        usage.requests += 1\n",
        "",
        "test_client_limits.py",
    ),
    Mutation(
        "boxes found in tiles stay where the tile had them",
        "models/contract/task_adapter.py",
        '"x1": box["x1"] + x,',
        '"x1": box["x1"],',
        "test_tiles.py",
    ),
    Mutation(
        "an ingress may know the scheduler",
        "app/ingress/items.py",
        "from app.link import ",
        "from app.scheduling.queue import Queue as _\nfrom app.link import ",
        "test_layers.py",
    ),
)


def planted(mutation: Mutation, root: Path) -> str:
    """The file's text with the fault. Raises ValueError where what it changes does not stand there once."""
    text = (root / mutation.file).read_text()
    if text.count(mutation.was) != 1:
        raise ValueError(f"{mutation.file} has {mutation.was!r} {text.count(mutation.was)} times")
    return text.replace(mutation.was, mutation.becomes)


def is_found(mutation: Mutation) -> bool:
    """Whether its test fails with the fault."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in _PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / part, copy / part)
        (copy / mutation.file).write_text(planted(mutation, copy))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/unit/{mutation.test}"]
        environment = {**os.environ, "PYTHONPATH": folder}
        try:
            return (
                subprocess.run(
                    command, cwd=copy, env=environment, capture_output=True, timeout=_LIMIT_S, check=False
                ).returncode
                == 1
            )
        except subprocess.TimeoutExpired:
            return True  # It waits for ever, which pytest's own limit would end.


def main() -> None:
    """Plant each, or those of these numbers; exit with how many no test has found."""
    numbers = [int(each) for each in sys.argv[1:]] or range(1, len(MUTATIONS) + 1)
    missed = 0
    for number in numbers:
        found = is_found(MUTATIONS[number - 1])
        missed += not found
        print(f"{number:2} {'found ' if found else 'MISSED'} {MUTATIONS[number - 1].fault}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
