"""Faults planted in the product, each of which a test finds.

    python -m tests.support.mutations [NUMBER …]

Owns: the list, and a run of it in copies of the tree, so that nothing is changed here. CONTRIBUTING names it; a unit
test says whether each fault can still be planted. Add one where code moves that others' answers hang on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("app", "models", "backends", "plugins", "tests", "benchmarks", "deploy", "docs", "pyproject.toml", "Makefile")
_AT_A_TIME = 2
_TEST_LIMIT_S, _LIMIT_S = 120, 600
"""Of one test, which without the fault takes seconds; of all that one fault runs."""


class Mutation(NamedTuple):
    """In `file`, `was`, which stands there once, becomes `becomes`; `test` fails then: a file of tests/unit, or one
    test of it (`test_budget.py::test_name`).
    """

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


def _copy(folder: Path) -> None:
    """Make a folder a copy of the tree."""
    for part in _PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / part, folder / part)


def _first_failure(copy: Path, tests: Sequence[str]) -> str:
    """The first of these tests of the unit room that fails in a copy of the tree; empty where all pass.

    Raises RuntimeError where they cannot be run, TimeoutExpired.
    """
    paths = [f"tests/unit/{each}" for each in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", *paths]
    ran = subprocess.run(
        [*command, f"--timeout={_TEST_LIMIT_S}"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if ran.returncode not in (0, 1):
        raise RuntimeError(ran.stdout[-2000:] + ran.stderr[-2000:])
    failed = re.search(r"^(?:FAILED|ERROR) \S*?([\w/]+\.py::\S+)", ran.stdout, re.MULTILINE)
    return failed[1] if failed else "one of them" if ran.returncode else ""


def _found_by(mutation: Mutation, copy: Path) -> str:
    """The test that fails with the fault, which is taken out again; empty where none does."""
    path = copy / mutation.file
    text = planted(mutation, copy)
    path.unlink()  # What was compiled of it is known by its time of change, which is another then.
    path.write_text(text)
    try:
        return _first_failure(copy, [mutation.test])
    finally:
        shutil.copy2(ROOT / mutation.file, path)


def found_by(mutations: Sequence[Mutation]) -> Iterator[str]:
    """By which test each fault is found, in order, two at a time; empty: by none of those that it names.

    Raises RuntimeError where a test fails without a fault: it finds nothing then.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_A_TIME) as threads:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(_AT_A_TIME):
            (copy := Path(folder) / str(number)).mkdir()
            _copy(copy)
            copies.put(copy)
        if failed := _first_failure(copy, sorted({each.test for each in mutations})):
            raise RuntimeError(f"{failed} fails without a fault")

        def one(mutation: Mutation) -> str:
            copy = copies.get()
            try:
                return _found_by(mutation, copy)
            finally:
                copies.put(copy)

        yield from threads.map(one, mutations)


def main() -> None:
    """Plant each, or those of these numbers; exit with how many no test has found."""
    numbers = [int(each) for each in sys.argv[1:]] or range(1, len(MUTATIONS) + 1)
    chosen = [MUTATIONS[number - 1] for number in numbers]
    missed = 0
    for number, mutation, test in zip(numbers, chosen, found_by(chosen), strict=True):
        missed += not test
        print(f"{number:2} {'found ' if test else 'MISSED'} {mutation.fault}{test and f': {test}'}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
