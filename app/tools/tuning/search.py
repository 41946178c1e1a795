"""Which settings to try next, and which of those tried are best: pure logic, with the clock and the trial as arguments.

    defaults ─► engine and precision ─► ladder ─► workers ─► decoders ─► again, around the best so far
             ─► the best against the defaults, turn and turn about

Owns: the order, the budget, the choice. Must not know services or devices.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Literal

Goal = Literal["throughput", "energy"]
_ROUNDS = 2  # Of all axes: what was best for one engine may not be for the next.
_CONFIRMATIONS = 3


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
    """What came of a candidate. `refusal`: why it does not serve; `served`: engine and precision that did."""

    candidate: Candidate
    images_per_s: float = 0.0
    p99_ms: float = inf
    joules_per_image: float = nan
    refusal: str = ""
    served: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Space:
    """What may be tried. `engines`: pairs of engine and precision."""

    engines: Sequence[tuple[str, str]]
    ladders: Sequence[tuple[int, ...]]
    workers: Sequence[int]
    decoders: Sequence[int]


@dataclass
class TuningOutcome:
    """`best` of the `trials`; `lead`: how many times as good as the defaults, in the last comparison (1: no better).

    `confirmed`: that comparison was made; `complete`: the budget sufficed for everything that was to be tried.
    """

    best: Trial
    default: Trial
    trials: list[Trial] = field(default_factory=list)
    lead: float = 1.0
    confirmed: bool = False
    complete: bool = True


class Search:
    """Coordinate descent from the defaults, within a budget."""

    def __init__(
        self,
        space: Space,
        evaluate: Callable[[Candidate], Trial],
        *,
        budget_s: float,
        clock: Callable[[], float],
        p99_ms: float = inf,
        goal: Goal = "throughput",
    ) -> None:
        self._space, self._evaluate, self._clock = space, evaluate, clock
        self._ends_s = clock() + budget_s
        self._p99_ms, self._goal = p99_ms, goal
        self._trials: dict[Candidate, Trial] = {}
        self._longest_s = 0.0
        self._complete = True

    def run(self, default: Candidate, starts: Sequence[Candidate] = ()) -> TuningOutcome:
        """Try the default, `starts` (what was best before), then around the best. Raises what `evaluate` raises."""
        first = self._tried(default)
        for candidate in starts:
            self._try_within_budget(candidate)
        for _ in range(_ROUNDS):
            before = self.best()
            for axis in (self._engines, self._ladders, self._workers, self._decoders):
                for candidate in axis(self.best().candidate):
                    self._try_within_budget(candidate)
            if self.best() is before:
                break
        best = self.best()
        outcome = TuningOutcome(best, first, list(self._trials.values()), complete=self._complete)
        return self._confirmed(outcome) if best is not first and not first.refusal else outcome

    def best(self) -> Trial:
        """Of those tried: the best that is quick enough, else the quickest; of equals the one tried first."""
        # What serves alike is one: `auto` and the engine that it stands for differ by chance alone.
        alike: dict[Candidate, Trial] = {}
        for trial in self._trials.values():
            engine, precision = trial.served if trial.served[0] else (trial.candidate.engine, trial.candidate.precision)
            alike.setdefault(replace(trial.candidate, engine=engine, precision=precision), trial)
        good = [trial for trial in alike.values() if not trial.refusal]
        if not good:
            return next(iter(self._trials.values()))
        quick = [trial for trial in good if trial.p99_ms <= self._p99_ms]
        return max(quick, key=self.worth) if quick else min(good, key=lambda trial: trial.p99_ms)

    def worth(self, trial: Trial) -> float:
        """What is to be as large as possible."""
        if self._goal == "energy":
            return 1 / trial.joules_per_image if trial.joules_per_image > 0 else 0.0
        return trial.images_per_s

    def _try_within_budget(self, candidate: Candidate) -> None:
        if candidate not in self._trials and self._clock() + self._longest_s > self._ends_s:
            self._complete = False
        else:
            self._tried(candidate)

    def _tried(self, candidate: Candidate) -> Trial:
        if candidate in self._trials:
            return self._trials[candidate]
        now_s = self._clock()
        trial = self._trials[candidate] = self._evaluate(candidate)
        self._longest_s = max(self._longest_s, self._clock() - now_s)
        return trial

    def _confirmed(self, outcome: TuningOutcome) -> TuningOutcome:
        """Both again, one after the other, so that what disturbs hits both; the defaults stay where they are better."""
        default, best = [outcome.default], [outcome.best]
        for _ in range(_CONFIRMATIONS):
            if len(default) > 1 and self._clock() + 2 * self._longest_s > self._ends_s:
                break
            default.append(self._evaluate(outcome.default.candidate))
            best.append(self._evaluate(outcome.best.candidate))
        # The first of each was measured at different times.
        worths = [statistics.median(self.worth(each) for each in trials[1:]) for trials in (default, best)]
        outcome.confirmed = True
        outcome.lead = worths[1] / worths[0] if worths[0] else inf
        slow = statistics.median(each.p99_ms for each in best[1:]) > self._p99_ms
        default_slow = statistics.median(each.p99_ms for each in default[1:]) > self._p99_ms
        if (outcome.lead < 1 and not default_slow) or (slow and not default_slow):
            outcome.best, outcome.lead = outcome.default, 1.0
        return outcome

    def _engines(self, best: Candidate) -> Iterator[Candidate]:
        for engine, precision in self._space.engines:
            yield replace(best, engine=engine, precision=precision)

    def _ladders(self, best: Candidate) -> Iterator[Candidate]:
        for ladder in self._space.ladders:
            yield replace(best, batch_sizes=ladder)

    def _workers(self, best: Candidate) -> Iterator[Candidate]:
        for count in self._space.workers:
            yield replace(best, workers=count)

    def _decoders(self, best: Candidate) -> Iterator[Candidate]:
        for count in self._space.decoders:
            yield replace(best, decoders=count)
