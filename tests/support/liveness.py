"""Check that a service answers all through a block, and that nothing holds its event loop up.

    with answering(service):  # The service was started with `guarded=True`.
        service.worker().kill()

A thread asks /v2/health/live again and again: every request gets a 200, however long that takes. The server's guard
(tests/support/loop_guard.py) reports what holds the loop up. If the server is to end (`ends`), it may stop to answer.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.support.loop_guard import Held, Witness, told, written

WAIT_S = 240
_INTERVAL_S = 0.02
_SLOW_S = 0.01


@dataclass
class Answering:
    """Number of requests, the failures among them, and, once the block has ended, what held the event loop up.

    `slow`: time of each slow answer's request, by time.monotonic(), and how long the answer took: for reports.
    """

    asked: int = 0
    failed: list[str] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    slow: list[tuple[float, float]] = field(default_factory=list, repr=False)

    @property
    def slowest_s(self) -> float:
        return max((taken_s for _, taken_s in self.slow), default=0.0)


class _Prober:
    def __init__(self, url: str, ends: bool) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.answers = Answering()
        self.until_s: float | None = None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=WAIT_S)
        self._ends = ends
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)

    def __enter__(self) -> _Prober:
        self._ask()  # Before the block: from here on there is an answer.
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.until_s is None:
            self._ask()
        self._connection.close()

    def _run(self) -> None:
        while self.until_s is None and not self._stop.wait(_INTERVAL_S):
            self._ask()

    def _ask(self) -> None:
        asked_s, wrong = time.monotonic(), ""
        try:
            self._connection.request("GET", "/v2/health/live")
            answer = self._connection.getresponse()
            answer.read()
            if answer.status != 200:
                wrong = f"{answer.status}"
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # The next request makes another.
            wrong = repr(error)
        self.answers.asked += 1
        taken_s = time.monotonic() - asked_s
        if taken_s > _SLOW_S:
            self.answers.slow.append((asked_s, taken_s))
        if wrong and self._ends:
            self.until_s = asked_s  # The same clock as perf_counter, here.
        elif wrong:
            self.answers.failed.append(wrong)


@contextlib.contextmanager
def observed(service: Any, *, ends: bool = False, at_admin: bool = False) -> Iterator[Answering]:
    """Ask a ServiceProcess for the length of the block.

    `ends`: the service ends in the block; from the first time it cannot be asked any more, nobody asks, and
    its loop may take its time. `at_admin`: ask its administration's port.
    """
    assert service.guard is not None, "the service was started without a guard"
    began_s = time.perf_counter()
    with Witness() as witness, _Prober(service.admin_url if at_admin else service.url, ends) as prober:
        yield prober.answers
    ended_s = prober.until_s or time.perf_counter()
    held = [each for each in written(service.guard) if began_s <= each.began_s and each.ended_s <= ended_s]
    prober.answers.held[:] = witness.confirmed(held)


@contextlib.contextmanager
def answering(service: Any, *, ends: bool = False, at_admin: bool = False) -> Iterator[Answering]:
    """Ask like `observed`, and assert that the service answered, and that nothing held its loop up."""
    with observed(service, ends=ends, at_admin=at_admin) as answers:
        yield answers
    assert answers.failed == [], f"of {answers.asked} requests {len(answers.failed)} got no answer"
    assert answers.asked > 1 or ends
    assert answers.held == [], told(answers.held)
