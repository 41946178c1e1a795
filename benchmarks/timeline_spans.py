"""`anychip serve` that records when it decodes, copies and computes: for benchmarks/timeline.py.

Owns: the measurements around the service's own functions, in the server (`main`) and, as a plugin, in its worker. Spans
are in seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FILE_VARIABLE = "ANYCHIP_TIMELINE_FILE"

_lock = threading.Lock()


def _write(row: str, start_s: float, end_s: float) -> None:
    with _lock, open(os.environ[FILE_VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps([row, start_s, end_s]) + "\n")


def _timed(row: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started_s = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            _write(row, started_s, time.monotonic())

    return timed


def main() -> int:
    """Run the service, with this module in its workers."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from app import cli
    from app.decoding.waiting import DecodeQueue
    from app.prepared import prepared

    took = DecodeQueue.took

    def timed_took(queue: DecodeQueue, model: int, taken_s: float) -> None:
        """Write what a decoder took, as the server sees it: a decoder itself is confined, and opens no file."""
        now_s = time.monotonic()
        _write("decode", now_s - taken_s, now_s)
        took(queue, model, taken_s)

    DecodeQueue.took = timed_took  # type: ignore[method-assign]
    words = [*sys.argv[1:], "--plugins", "benchmarks.timeline_spans"]
    with prepared(words):
        return cli.main(words)


def _watch_worker() -> None:
    from app.worker.loop import Worker
    from backends.contract.backend import Executable
    from backends.engines.streamed import StreamedExecutable

    Worker._gathered = _timed("gather", Worker._gathered)  # type: ignore[method-assign]
    Worker._rows = _timed("gather", Worker._rows)  # type: ignore[method-assign]
    run = Executable.run

    def timed_run(executable: Executable, pixels: Any) -> Any:
        if isinstance(executable, StreamedExecutable):
            return run(executable, pixels)
        return _timed("compute", run)(executable, pixels)

    Executable.run = timed_run  # type: ignore[method-assign]
    begin = StreamedExecutable._begin

    def timed_begin(executable: StreamedExecutable, parts: Any, size: int) -> Any:
        if "_watched" not in executable.__dict__:
            executable.__dict__["_watched"] = _DeviceClock(executable)
        executable.__dict__["_watched"].flush()
        return begin(executable, parts, size)

    StreamedExecutable._begin = timed_begin  # type: ignore[method-assign]


class _DeviceClock:
    """Clock of a device's own streams, by its events: the host's clock only tells when work was submitted."""

    def __init__(self, executable: Any) -> None:
        module = executable._module
        module.synchronize()
        self._module = module
        self._base = module.Event(enable_timing=True)
        self._base.record()
        module.synchronize()
        self._base_s = time.monotonic()
        self._pending: list[tuple[str, Any, Any]] = []
        compute, stream = executable._compute, module.stream

        def watched_compute(on_device: Any, hosts: Any) -> None:
            with self._between("compute"):
                compute(on_device, hosts)

        @contextmanager
        def watched_stream(on: Any) -> Iterator[None]:
            with stream(on), self._between("copy"):
                yield

        class _Module:
            def __getattr__(self, name: str) -> Any:
                return watched_stream if name == "stream" else getattr(module, name)

        executable._compute, executable._module = watched_compute, _Module()

    @contextmanager
    def _between(self, row: str) -> Iterator[None]:
        first, last = (self._module.Event(enable_timing=True) for _ in range(2))
        first.record()
        try:
            yield
        finally:
            last.record()
            self._pending.append((row, first, last))

    def flush(self) -> None:
        """Write the spans that have ended."""
        while self._pending and self._pending[0][2].query():
            row, first, last = self._pending.pop(0)
            start_s, end_s = (self._base_s + self._base.elapsed_time(each) / 1e3 for each in (first, last))
            _write(row, start_s, end_s)


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "benchmarks.timeline_spans":
    _watch_worker()
