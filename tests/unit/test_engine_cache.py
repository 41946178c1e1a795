"""Compiled networks on disk: whole or not there, checked, bounded."""

from __future__ import annotations

import hashlib
import json
import os
import stat

import pytest

from backends.engines.cache import EngineCache, private_folder

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


@pytest.mark.parametrize(
    "harm", ["changed", "shorter", "gone", "more", "no manifest", "no sense", "unsigned", "forged"]
)
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
        case "more":
            (entry / "more" / "evil.so").write_text("")
        case "unsigned" | "forged":
            manifest = json.loads((entry / "manifest.json").read_text())
            (entry / "model.bin").write_text("evil")
            manifest["files"]["model.bin"] = hashlib.sha256(b"evil").hexdigest()
            if harm == "unsigned":
                del manifest["signature"]
            (entry / "manifest.json").write_text(json.dumps(manifest))
        case "no sense":
            (entry / "manifest.json").write_text("[]")
    assert cache.get(**PARTS) is None
    assert not entry.exists()
    assert cache.put(writing("weights"), **PARTS) == cache.get(**PARTS)


@pytest.mark.parametrize("error", [RuntimeError("Can't write"), OSError(28, "No space left"), ValueError("short")])
def test_what_cannot_be_written_is_not_kept_and_named_once(tmp_path, caplog, error):
    """OpenVINO raises RuntimeError where the disk is full."""

    def fails(folder):
        (folder / "half").write_text("half")
        raise error

    for cache in (EngineCache(tmp_path), EngineCache(tmp_path)):
        assert cache.put(fails, **PARTS) is None
    assert list(tmp_path.iterdir()) == []
    [line] = caplog.messages
    assert str(error) in line
    assert EngineCache(tmp_path).put(writing("weights"), **PARTS) is not None


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


def test_the_key_is_this_users_alone_and_one_that_others_could_know_is_replaced(tmp_path):
    cache = EngineCache(tmp_path)
    cache.put(writing("weights"), **PARTS)
    key = tmp_path / ".key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    known = key.read_bytes()
    key.chmod(0o644)
    assert cache.get(**PARTS) is None, "whoever read it could have signed this"
    assert key.read_bytes() != known
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert cache.put(writing("weights"), **PARTS) == cache.get(**PARTS)
    key.unlink()
    assert cache.get(**PARTS) is None


def test_compilers_keep_nothing_where_others_may_write(tmp_path):
    folder = tmp_path / "torchair"
    assert private_folder(folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o775)
    assert private_folder(folder) is None
    (tmp_path / "file").write_text("")
    assert private_folder(tmp_path / "file" / "torchair") is None
