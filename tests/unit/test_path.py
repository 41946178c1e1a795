"""The counter of benchmarks.path: which calls and records it sees."""

from __future__ import annotations

from app.observability.histogram import Series
from app.processes.arena import FreeSlots, Pool
from app.scheduling.queue import Queue, Reservation
from app.worker.begin import Begin
from benchmarks.path import Walk, records_in


def test_a_walk_counts_calls_and_changes_of_file() -> None:
    slots = FreeSlots(4)
    with Walk(("app",)) as walk:
        slots.take()
        slots.take()
        Series([1.0]).observe(0.5)
        slots.take()
    slots.take()
    assert walk.files == {"app/processes/arena.py", "app/observability/histogram.py"}
    assert [name for _, name in walk.calls] == ["take", "take", "__init__", "observe", "take"]
    assert walk.changes == 2
    assert str(walk) == "2 files, 5 calls, 2 changes of file"


def test_a_walk_counts_the_folders_that_are_asked_for() -> None:
    with Walk(("models",)) as walk:
        FreeSlots(3).take()
    assert walk.calls == []


def test_a_walk_sees_the_records_that_are_given_and_those_within() -> None:
    with Walk(("app",), records=True) as walk:
        Queue(3).begin(Reservation("m", 1, 0, 9.0))
    assert walk.records == {"Queue", "Reservation"}
    begin = Begin("worker", {}, ("info", "auto"), (Pool(1, 2, 3, 4, 5, 6),), [])
    assert records_in([begin]) == {"Begin", "Pool"}
    assert records_in({"a": 1}) == records_in(3) == records_in(()) == set()
