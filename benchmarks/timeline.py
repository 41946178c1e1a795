"""Draw a timeline of the service under load: do decoding, copying and computing run at once?

Owns: the load, the drawing and the shares. benchmarks/timeline_spans.py writes the times. A device's copies
and computations are timed by its own events, on its own streams; a CPU's batch is gathered, not copied.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from anychip_tools.benchmark.load import drive
from benchmarks import servers

Span = tuple[float, float]
ROWS = ("decode", "gather", "copy", "compute")


def main() -> None:
    """Run the measurement and print the timeline."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", default="sample")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--window-ms", type=float, default=600.0, help="how much of it is drawn")
    parser.add_argument("options", nargs="*", help="of anychip serve, after --")
    arguments = parser.parse_args()
    spans = measured(
        arguments.model, arguments.concurrency, arguments.seconds, ["--weights", arguments.weights, *arguments.options]
    )
    end_s = max(end for _, end in spans["compute"])
    start_s = end_s - arguments.seconds / 2  # By then batches are full.
    print(drawn(spans, start_s, start_s + arguments.window_ms / 1e3))
    for text in shares(spans, start_s, end_s):
        print(text)


def measured(model: str, concurrency: int, seconds: float, options: Sequence[str]) -> dict[str, list[Span]]:
    """Return the spans by row, in seconds, under the load of `concurrency` clients."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spans.jsonl"
        os.environ["ANYCHIP_TIMELINE_FILE"] = str(file)
        try:
            with servers.service(model, *options, module="benchmarks.timeline_spans") as server:
                # Drop the spans of the start.
                file.write_text("")
                request = servers.service_request(model, servers.sample_image())
                drive(server.port, request, concurrency, seconds)
        finally:
            del os.environ["ANYCHIP_TIMELINE_FILE"]
        spans: dict[str, list[Span]] = {row: [] for row in ROWS}
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # The last one may be cut.
                row, start_s, end_s = json.loads(line)
                spans[row].append((start_s, end_s))
    return {row: sorted(each) for row, each in spans.items() if each}


def drawn(spans: dict[str, list[Span]], start_s: float, end_s: float, width: int = 100) -> str:
    """Draw one line a row: for decoding the number of threads, for the others the batch's last digit."""
    step_s = (end_s - start_s) / width
    lines = [f"{'':9}{(end_s - start_s) * 1e3:.0f} ms, {step_s * 1e3:.1f} ms a column"]
    for row, each in spans.items():
        cells = []
        for column in range(width):
            at_s = start_s + (column + 0.5) * step_s
            under_way = [number for number, (first, last) in enumerate(each) if first <= at_s < last]
            digit = len(under_way) if row == "decode" else sum(under_way[:1])
            cells.append(str(digit % 10) if under_way else " ")
        lines.append(f"{row:8} {''.join(cells)}")
    return "\n".join(lines)


def shares(spans: dict[str, list[Span]], start_s: float, end_s: float) -> list[str]:
    """Return how much of the time the device computes, and how much of the other work overlaps with it."""
    rows = {row: _clipped(each, start_s, end_s) for row, each in spans.items()}
    compute = rows["compute"]
    busy_s = _length(compute)
    texts = [f"the device computes {busy_s / (end_s - start_s):.0%} of the time"]
    for row in ("decode", "copy"):
        if rows.get(row):
            both_s = _overlap(rows[row], compute)
            texts.append(f"{row}: {both_s / _length(rows[row]):.0%} of it while the device computes")
    return texts


def _clipped(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    """Return the union of the spans within the window."""
    union: list[Span] = []
    for span in spans:
        first, last = max(span[0], start_s), min(span[1], end_s)
        if union and first <= union[-1][1]:
            union[-1] = (union[-1][0], max(last, union[-1][1]))
        elif first < last:
            union.append((first, last))
    return union


def _length(spans: Sequence[Span]) -> float:
    return sum(last - first for first, last in spans)


def _overlap(one: Sequence[Span], other: Sequence[Span]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


if __name__ == "__main__":
    main()
