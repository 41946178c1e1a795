"""Compiled networks on disk: whole or not there, checked, bounded."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from backends.engine_cache import EngineCache

PARTS = {"engine": "openvino", "key": "abc", "shape": (224, 224, 3)}


def writing(text):
    def write(folder):
        (folder / "model.bin").write_text(text)
        (folder / "more").mkdir()
        (folder / "more" / "model.xml").write_text("<net/>")

    return write


def test_what_was_put_is_got_by_the_same_parts_only(tmp_path):
    cache = EngineCache(tmp_path / "engines")
    assert cache.get(**PARTS) is None
    assert cache.put(writing("weights"), **PARTS) == cache.get(**PARTS)
    assert (cache.get(**PARTS) / "model.bin").read_text() == "weights"
    assert cache.get(**{**PARTS, "key": "abd"}) is None
    assert EngineCache(tmp_path / "engines").get(**PARTS) is not None


@pytest.mark.parametrize("harm", ["changed", "shorter", "gone", "no manifest", "no sense"])
def test_a_damaged_entry_is_removed_and_made_again(tmp_path, harm):
    cache = EngineCache(tmp_path)
    entry = cache.put(writing("weights"), **PARTS)
    match harm:
        case "changed":
            (entry / "model.bin").write_text("weighty")
        case "shorter":
            (entry / "model.bin").write_text("")
        case "gone":
            (entry / "more" / "model.xml").unlink()
        case "no manifest":
            (entry / "manifest.json").unlink()
        case "no sense":
            (entry / "manifest.json").write_text("[]")
    assert cache.get(**PARTS) is None
    assert not entry.exists()
    assert cache.put(writing("weights"), **PARTS) == cache.get(**PARTS)


def test_what_fails_leaves_nothing(tmp_path):
    def fails(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no memory")

    cache = EngineCache(tmp_path)
    with pytest.raises(RuntimeError, match="no memory"):
        cache.put(fails, **PARTS)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_bounded_and_what_was_used_last_stays(tmp_path):
    cache = EngineCache(tmp_path, limit_bytes=6000)
    entries = {name: cache.put(writing("x" * 1500), key=name) for name in "abc"}
    for age, name in enumerate("abc"):
        os.utime(entries[name], (age, age))
    assert cache.get(key="a") is not None  # Used: b is the oldest now.
    newest = cache.put(writing("x" * 1500), key="d")
    assert [name for name, entry in entries.items() if entry.exists()] == ["a", "c"]
    assert newest.exists()
    assert cache.get(key="b") is None


def test_one_that_is_larger_than_all_may_hold_is_kept_alone(tmp_path):
    cache = EngineCache(tmp_path, limit_bytes=100)
    cache.put(writing("x"), key="a")
    assert cache.put(writing("x" * 1000), key="b") is not None
    assert cache.get(key="a") is None
    assert cache.get(key="b") is not None


def test_several_that_make_the_same_at_once_leave_one(tmp_path):
    cache, together = EngineCache(tmp_path), threading.Barrier(4)

    def write(folder):
        together.wait(10)
        writing("weights")(folder)

    with ThreadPoolExecutor(4) as threads:
        entries = list(threads.map(lambda _: cache.put(write, **PARTS), range(4)))
    assert set(entries) == {cache.get(**PARTS)}
    assert list(tmp_path.iterdir()) == entries[:1]


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("")
    cache = EngineCache(tmp_path / "file" / "engines")
    assert cache.put(writing("weights"), **PARTS) is None
    assert cache.get(**PARTS) is None
