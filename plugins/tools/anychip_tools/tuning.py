"""Choice of the next settings to try, and of the best; and a trial: a service in a child process, under load over HTTP.

The choice knows neither services nor devices: the clock and the trial are arguments.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Any

import httpx
import psutil

from anychip_tools.benchmark.load import drive, request_bytes
from anychip_tools.child_service import ServiceStartError, serving

_ROUNDS = 2  # Rounds over all axes: the best for one engine may not be the best for the next.
_COMPARISONS = 3
_COMPARISONS_KEPT_FOR = 2
"""Rounds of the last comparison for which time is kept; one is always made."""
_START_LIMIT_S = 600.0
_WARM_UP_S = 1.0
_IDLE_LIMIT_S = 60.0
_IDLE_INTERVAL_S = 0.25
_IDLE_TIMES = 3
_IDLE_SHARE = 0.3
"""Share of one core."""
_MOST_CONNECTIONS = 128
_ENERGY = re.compile(r"^anychip_device_energy_joules_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Candidate:
    """Settings of a service. `decoders` 0: one a core."""

    engine: str
    precision: str
    batch_sizes: tuple[int, ...]
    workers: int
    decoders: int


@dataclass(frozen=True)
class Trial:
    """Result of a candidate. `refusal`: why it does not serve; `served`: engine and precision that served."""

    candidate: Candidate
    images_per_s: float = 0.0
    p99_ms: float = inf
    joules_per_image: float = nan
    refusal: str = ""
    served: tuple[str, str] = ("", "")


Axis = Sequence[Mapping[str, Any]]
"""Values of one or more of a candidate's settings, by name, to try one after the other."""


@dataclass(frozen=True)
class Compared:
    """Candidate of the last comparison: its trial of each round, in order. `lead`: how many times as good the best is.

    A trial that failed has 0 images a second, and an infinite latency.
    """

    rounds: tuple[Trial, ...]
    lead: float = 1.0

    @property
    def median(self) -> Trial:
        """Trial with the median of each figure."""
        rate = statistics.median(each.images_per_s for each in self.rounds)
        p99_ms = statistics.median(each.p99_ms for each in self.rounds)
        joules = statistics.median(each.joules_per_image for each in self.rounds)
        return Trial(self.rounds[0].candidate, rate, p99_ms, joules, served=self.rounds[-1].served)


@dataclass
class TuningOutcome:
    """Outcome of a search: the `best` of the `trials`, and the trial of the `default` settings.

    `comparison`: the best, the second best and the defaults (two, where the defaults are one of the others), measured
    in turn, the best first; empty if only one setting serves, or was tried. `lead`: how many times as good as the
    defaults the best is there; 1 without a comparison. `complete`: the budget sufficed for every trial.
    """

    best: Trial
    default: Trial
    trials: list[Trial] = field(default_factory=list)
    comparison: list[Compared] = field(default_factory=list)
    lead: float = 1.0
    complete: bool = True

    @property
    def lead_over_second(self) -> float:
        """Lead of the best over the next one; 1 without a comparison."""
        return self.comparison[1].lead if self.comparison else 1.0


class Search:
    """Coordinate descent from the defaults, within a budget."""

    def __init__(
        self,
        axes: Sequence[Axis],
        evaluate: Callable[[Candidate], Trial],
        *,
        budget_s: float,
        clock: Callable[[], float],
        p99_ms: float = inf,
    ) -> None:
        self._axes, self._evaluate, self._clock = axes, evaluate, clock
        self._ends_s = clock() + budget_s
        self._p99_ms = p99_ms
        self._trials: dict[Candidate, Trial] = {}
        # Candidates that serve alike count as one: `auto` and its engine differ by chance alone.
        self._alike: dict[Candidate, Trial] = {}
        self._took_s: dict[Candidate, float] = {}
        self._complete = True

    def run(self, default: Candidate, starts: Sequence[Candidate] = ()) -> TuningOutcome:
        """Try the default, `starts` (earlier best settings), then around the best. Raises what `evaluate` raises."""
        first = self._tried(default)
        for candidate in starts:  # Also beyond the budget: else the defaults would replace them untried.
            self._tried(candidate)
        for _ in range(_ROUNDS):
            before = self.best()
            for axis in self._axes:
                around = self.best().candidate
                for values in axis:
                    self._try_within_budget(replace(around, **values), self._kept_s(first))
            if self.best() is before:
                break
        outcome = TuningOutcome(self.best(), first, list(self._trials.values()), complete=self._complete)
        self._compare(outcome)
        return outcome

    def best(self) -> Trial:
        """Return the best trial that is quick enough, else the quickest; of equals the one tried first."""
        return self._ranked(self._serving())[0] if self._serving() else next(iter(self._trials.values()))

    def _serving(self) -> list[Trial]:
        return [trial for trial in self._alike.values() if not trial.refusal]

    def _ranked(self, trials: Sequence[Trial]) -> list[Trial]:
        """Sort the trials that are quick enough by images a second, then the others by latency; the sort is stable."""
        slow = [trial for trial in trials if trial.p99_ms > self._p99_ms]
        quick = [trial for trial in trials if trial.p99_ms <= self._p99_ms]
        return sorted(quick, key=lambda trial: -trial.images_per_s) + sorted(slow, key=lambda trial: trial.p99_ms)

    def _try_within_budget(self, candidate: Candidate, keep_s: float) -> None:
        expected_s = statistics.mean(self._took_s.values())
        known = candidate in self._trials or candidate in self._alike
        if not known and self._clock() + expected_s + keep_s > self._ends_s:
            self._complete = False
        else:
            self._tried(candidate)

    def _tried(self, candidate: Candidate) -> Trial:
        if candidate in self._alike:
            return self._alike[candidate]
        if candidate not in self._trials:
            trial = self._trials[candidate] = self._timed(candidate)
            engine, precision = trial.served if trial.served[0] else (candidate.engine, candidate.precision)
            self._alike.setdefault(replace(candidate, engine=engine, precision=precision), trial)
        return self._trials[candidate]

    def _timed(self, candidate: Candidate) -> Trial:
        now_s = self._clock()
        trial = self._evaluate(candidate)
        self._took_s[candidate] = self._clock() - now_s  # Time of the last trial: the first may have compiled.
        return trial

    def _contenders(self, default: Trial) -> list[Candidate]:
        first = [] if default.refusal else [default.candidate]
        return list(dict.fromkeys([*first, *(each.candidate for each in self._ranked(self._serving())[:2])]))

    def _kept_s(self, default: Trial) -> float:
        """Return the time to keep for the last comparison; 0 while there is nothing to compare.

        Candidates already tried are compiled, so that they take no longer then than the shortest trial.
        """
        if len(contenders := self._contenders(default)) < 2:
            return 0.0
        shortest_s = min(self._took_s[trial.candidate] for trial in self._serving())
        return _COMPARISONS_KEPT_FOR * len(contenders) * shortest_s

    def _compare(self, outcome: TuningOutcome) -> None:
        """Measure the contenders again, in turn, so that disturbances hit all. The best there is the best.

        Their first figures do not count: they come from different times, and the best of many was lucky.
        """
        candidates = self._contenders(outcome.default)
        if len(candidates) < 2:
            return
        rounds: list[list[Trial]] = []
        for _ in range(_COMPARISONS):
            if rounds and self._clock() + sum(self._took_s[each] for each in candidates) > self._ends_s:
                break
            rounds.append([self._timed(candidate) for candidate in candidates])
        compared = {tried[0].candidate: Compared(tried) for tried in zip(*rounds, strict=True)}
        ranked = self._ranked([each.median for each in compared.values()])
        outcome.best = ranked[0]
        outcome.comparison = [replace(compared[each.candidate], lead=self._lead(ranked[0], each)) for each in ranked]
        if outcome.default.candidate in compared:
            outcome.default = compared[outcome.default.candidate].median
            outcome.lead = self._lead(ranked[0], outcome.default)

    def _lead(self, best: Trial, other: Trial) -> float:
        if best.images_per_s == other.images_per_s:
            return 1.0
        return best.images_per_s / other.images_per_s if other.images_per_s else inf


@dataclass(frozen=True)
class Trials:
    """Trials of a model. `options`: of every service, as `anychip serve` takes them; `seconds`: of one measurement."""

    model: str
    options: Sequence[str]
    image: bytes
    seconds: float
    p99_ms: float
    devices: int

    def evaluate(self, candidate: Candidate) -> Trial:
        """Start, load and stop a service. A candidate that does not serve is a trial with its refusal."""
        options = (
            *self.options,
            *("--engine", candidate.engine, "--precision", candidate.precision),
            *("--batch-sizes", ",".join(map(str, candidate.batch_sizes))),
            *("--workers-per-device", str(candidate.workers), "--decoders", str(candidate.decoders)),
        )
        try:
            with serving(options) as (port, process):
                served = self._settled(port, candidate)
                _wait_until_idle(process.pid)
                return self._measured(port, candidate, served)
        except ServiceStartError as error:
            return Trial(candidate, refusal=str(error))

    def _measured(self, port: int, candidate: Candidate, served: tuple[str, str]) -> Trial:
        request = request_bytes(f"/v1/models/{self.model}:predict", self.image, "image/jpeg")
        connections = 2 * candidate.batch_sizes[-1] * candidate.workers * self.devices
        connections = min(_MOST_CONNECTIONS, max(8, connections))
        drive(port, request, connections, _WARM_UP_S)
        while True:
            before_joules = self._joules(port)
            load = drive(port, request, connections, self.seconds)
            joules = self._joules(port) - before_joules
            if load.errors or not load.latencies_s:
                return Trial(candidate, refusal=f"requests failed: {dict(load.errors)}", served=served)
            trial = Trial(
                candidate,
                load.answers_per_s,
                load.percentile_ms(99),
                joules / len(load.latencies_s) if joules > 0 else nan,
                served=served,
            )
            if trial.p99_ms <= self.p99_ms or connections == 1:
                return trial
            connections = max(1, math.floor(connections * min(0.75, self.p99_ms / trial.p99_ms)))

    def _settled(self, port: int, candidate: Candidate) -> tuple[str, str]:
        """Wait for the wanted engine and precision, for which others may stand in at first; return both."""
        limit_s = time.monotonic() + _START_LIMIT_S
        while True:
            models = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=30, trust_env=False).json()["models"]
            served_on = next(each for each in models if each["name"] == self.model)["served_on"]
            served = [(each["engine"], each["precision"]) for each in served_on]
            # An engine may also stand in for itself: in bf16, as long as int8 is not ready.
            staged = any(each["staged"] for each in served_on)
            if served and not staged and all(candidate.engine in ("auto", engine) for engine, _ in served):
                return served[0]
            if time.monotonic() > limit_s:
                raise ServiceStartError(
                    f"{candidate.engine} {candidate.precision} was not ready within {_START_LIMIT_S:g} s"
                )
            time.sleep(0.5)

    def _joules(self, port: int) -> float:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30, trust_env=False).text
        found = [float(value) for value in _ENERGY.findall(text)]
        return sum(found) if found else nan


def _wait_until_idle(pid: int) -> None:
    limit_s = time.monotonic() + _IDLE_LIMIT_S
    before_s, quiet = _processor_s(pid), 0
    while quiet < _IDLE_TIMES and time.monotonic() < limit_s:
        time.sleep(_IDLE_INTERVAL_S)
        now_s = _processor_s(pid)
        quiet = quiet + 1 if 0 <= now_s - before_s <= _IDLE_SHARE * _IDLE_INTERVAL_S else 0
        before_s = now_s


def _processor_s(pid: int) -> float:
    service = psutil.Process(pid)
    total_s = 0.0
    for process in (service, *service.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s
