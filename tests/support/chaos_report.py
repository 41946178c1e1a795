"""Results of a chaos run: written as JSON, and as the tables of docs/reliability.md.

    .venv/bin/python -m tests.support.chaos_report result.json    # takes a run over into the page

Owns: the form of a result, and its part of the page (between two marks). Must not run anything.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
RECORDED = Path(__file__).with_name("chaos_result.json")
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"


@dataclass
class FaultRow:
    """Kind of fault. `in_flight`: sum of the innocent's requests in flight at its beginnings; `lost` and `wrong`:
    requests in flight at some time between a fault and the service's recovery; `least_goodput`: answers of the worst
    model to clients in a hurry afterwards, as a share of before."""

    fault: str
    times: int = 0
    in_flight: int = 0
    lost: int = 0
    wrong: int = 0
    longest_pause_ms: float = 0.0
    longest_recovery_s: float = 0.0
    least_goodput: float | None = None


@dataclass
class Result:
    """Result of a run. `state`: the service's resources at start and end; `offended`: answers to bad requests."""

    date: str
    processor: str
    cores: int
    seconds: int
    requests: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    wrong: int = 0
    live_asked: int = 0
    live_slowest_ms: float = 0.0
    loop_stall_ms: float = 0.0
    faults: list[FaultRow] = field(default_factory=list)
    state: dict[str, tuple[float, float]] = field(default_factory=dict)
    offended: dict[str, dict[str, int]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Result:
    """Read a result that `Result.write` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["faults"] = [FaultRow(**row) for row in content["faults"]]
    return Result(**content)


def measured(result: Result) -> str:
    """Format a run as its part of the page."""
    answered = sum(result.requests.values())
    lines = [
        f"Measured on {result.date}, {result.cores} cores of {result.processor}, {result.seconds} s:",
        f"{answered:,} requests of innocent clients, {result.lost} lost, {result.wrong} wrong. `/v2/health/live` was "
        f"asked {result.live_asked:,} times; the slowest answer took {result.live_slowest_ms:.0f} ms. The event loop's "
        f"longest stall was {result.loop_stall_ms:.0f} ms.",
        "",
        "| fault | times tried | requests in flight | lost | wrong | longest stall, ms | until all was well, s "
        "| least goodput afterwards |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.fault} | {row.times} | {row.in_flight} | {row.lost} | {row.wrong} | {row.longest_pause_ms:.0f} "
            f"| {row.longest_recovery_s:.1f} | {'' if row.least_goodput is None else f'{row.least_goodput:.0%}'} |"
            for row in result.faults
        ),
        "",
        "| what the service held | at the start | at the end |",
        "|---|---|---|",
        *(f"| {what} | {before:,.0f} | {after:,.0f} |" for what, (before, after) in result.state.items()),
        "",
        "| bad request | answers |",
        "|---|---|",
        *(
            f"| {what} | {', '.join(f'{answer}: {count}' for answer, count in sorted(answers.items()))} |"
            for what, answers in sorted(result.offended.items())
        ),
        "",
    ]
    return "\n".join(lines)


def page(text: str, result: Result) -> str:
    """Return the page with the figures of a run. Raises ValueError if it has no place for them."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + "\n" + measured(result) + "\n" + text[end:]


def main(path: Path) -> None:
    """Keep a result as the recorded one, and bring the page up to date."""
    result = read(path)
    result.write(RECORDED)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
