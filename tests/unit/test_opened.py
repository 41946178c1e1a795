"""A model's folder as a hostile archive: which files are read, what their digest is, and what a worker reads later."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models import WeightsError, WeightsNotFoundError
from models.contract.files import MAX_TEXT_BYTES, OpenedFiles, digest_of_all, open_regular, read_regular, sha256_of
from models.weights.opened import copied, looked_at, mend, remove_unused

DAY_S = 86_400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model of two files, and a file beside its folder that does not belong to it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.bin").write_bytes(b"weights")
    (tmp_path / "model" / "labels.txt").write_text("cat\ndog\n")
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "model"


def look(folder: Path, *within: str) -> OpenedFiles:
    return looked_at(folder / "net.bin", ["labels.txt", "config.json"], lambda _: within)


def replaced_by(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def linking(**targets: str) -> Callable[[Path], object]:
    """Return a function that makes links in a path's folder, and at last the path (`it`) itself."""

    def make(path: Path) -> None:
        for name, target in targets.items():
            (path if name == "it" else path.with_name(name)).symlink_to(target.replace("NAME", path.name))

    return make


def to_a_folder(path: Path) -> None:
    path.with_name("sub").mkdir(exist_ok=True)
    path.symlink_to("sub")


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link out": (lambda path: path.symlink_to("../secret"), "link out of its folder, to .*secret"),
    "an absolute link": (lambda path: path.symlink_to("/proc/self/environ"), "link out of its folder"),
    "a link to the root": (lambda path: path.symlink_to("/"), "link out of its folder, to /"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "link to what is not there"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot be read"),
    "a chain of links out": (
        linking(one="two/../../secret", it="one"),
        "link out of its folder|link to what is not there",
    ),
    "links in a circle": (linking(other="NAME", it="other"), "cannot be read"),
    "a link to a folder in it": (to_a_folder, "no plain file"),
    "a link to the folder itself": (lambda path: path.symlink_to("."), "link out of its folder"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "link out of its folder, to /dev/zero"),
    "a socket": (lambda path: os.mknod(path, 0o600 | stat.S_IFSOCK), "cannot be read"),
    "a pipe": (os.mkfifo, "no plain file"),
    "a folder": (Path.mkdir, "no plain file"),
    "a pointer": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid 1\n"), "git lfs pull"),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", ["net.bin", "labels.txt", "config.json", "outside.data"])
def test_only_plain_files_of_the_folder_are_read(folder: Path, kind: str, name: str) -> None:
    make, sentence = STRANGE[kind]
    replaced_by(folder / name, make)
    with pytest.raises(WeightsError, match=sentence):
        look(folder, *(["outside.data"] if name == "outside.data" else []))


WITHIN: dict[str, Callable[[Path], object]] = {
    "a link to a file beside it": lambda path: path.symlink_to("kept"),
    "a chain of links": linking(one="kept", it="one"),
    "a link to a file in a folder": lambda path: path.symlink_to("sub/kept"),
    "a link through a link to a folder": linking(other="sub", it="other/kept"),
    "a link out and in again": lambda path: path.symlink_to("../model/kept"),
    "an absolute link": lambda path: path.symlink_to(path.parent / "kept"),
}


@pytest.mark.parametrize("name", ["net.bin", "labels.txt", "config.json", "outside.data"])
@pytest.mark.parametrize("kind", WITHIN)
def test_a_link_that_ends_in_its_folder_is_read_and_is_in_the_digest(
    folder: Path, tmp_path: Path, kind: str, name: str
) -> None:
    for kept in (folder / "kept", folder / "sub" / "kept"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(b"kept")
    replaced_by(folder / name, WITHIN[kind])
    found = look(folder, *(["outside.data"] if name == "outside.data" else []))
    assert dict(found.digests)[name] == hashlib.sha256(b"kept").hexdigest()
    files = copied(found, tmp_path / "store")
    assert (Path(files.folder) / name).read_bytes() == b"kept"
    assert not (Path(files.folder) / name).is_symlink()


@pytest.mark.parametrize("inside", ["", "onnx", "onnx/int8"])
def test_the_cache_of_hugging_face_may_have_folders(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "1234" / inside
    blobs = tmp_path / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "77").write_bytes(b"weights")
    (folder / "net.bin").symlink_to(os.path.relpath(blobs / "77", folder))
    files = look(folder)
    assert (files.sha256, files.paths) == (hashlib.sha256(b"weights").hexdigest(), [blobs / "77"])
    (tmp_path / "models--a--b" / "refs").write_text("secret")
    (blobs / "in").mkdir()
    (blobs / "in" / "78").write_text("secret")
    (blobs / "78").symlink_to("/etc/passwd")
    for secret in (tmp_path / "models--a--b" / "refs", blobs / "in" / "78", blobs / "78"):
        replaced_by(folder / "config.json", linking(it=str(secret)))
        with pytest.raises(WeightsError, match=r"config\.json is a link out of its folder"):
            look(folder)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../secret", "", ".", "a\nb", "..\\secret", "missing"]
)
def test_names_that_a_file_states_stay_in_its_folder(folder: Path, name: str) -> None:
    with pytest.raises(WeightsError, match="not beside it"):
        look(folder, name)


def test_files_that_describe_have_a_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    with pytest.raises(WeightsError, match=r"config\.json is larger than"):
        look(folder)
    with pytest.raises(WeightsError, match=r"labels\.txt is larger than 3 bytes"):
        read_regular(folder / "labels.txt", 3)


def test_an_exchange_between_the_look_and_the_opening_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "part").write_text("part")
    real_open = os.open

    def file_becomes_a_link(*arguments: Any) -> int:
        replaced_by(folder / "labels.txt", lambda path: path.symlink_to("../secret"))
        return real_open(*arguments)

    monkeypatch.setattr(os, "open", file_becomes_a_link)
    with pytest.raises(WeightsError, match=r"labels\.txt cannot be read"):
        open_regular(folder / "labels.txt")

    def folder_becomes_a_link(*arguments: Any) -> int:
        (folder / "sub").rename(folder / "was")
        (folder.parent / "part").write_text("secret")
        (folder / "sub").symlink_to("..")
        return real_open(*arguments)

    monkeypatch.setattr(os, "open", folder_becomes_a_link)
    with pytest.raises(WeightsError, match="part was exchanged while it was opened"):
        open_regular(folder / "sub" / "part", folder)


def test_one_digest_covers_every_file(folder: Path) -> None:
    both = look(folder)
    lines = "".join(f"{sha256_of(folder / name)}  {name}\n" for name in ("labels.txt", "net.bin"))
    assert both.sha256 == hashlib.sha256(lines.encode()).hexdigest()
    (folder / "labels.txt").write_text("dog\ncat\n")
    assert look(folder).sha256 != both.sha256
    (folder / "labels.txt").unlink()
    assert look(folder).sha256 == sha256_of(folder / "net.bin"), "of a single file it is the file's own"
    assert digest_of_all([("b", "1"), ("a", "2")]) == digest_of_all([("a", "2"), ("b", "1")])
    with pytest.raises(WeightsNotFoundError):
        looked_at(folder / "missing")


@pytest.mark.parametrize("change", ["replaced", "cut", "removed", "written over"])
def test_a_copy_stays_what_was_opened(folder: Path, tmp_path: Path, change: str) -> None:
    files = copied(look(folder), tmp_path / "store")
    assert files.is_copy
    assert files.source == str(folder / "net.bin")
    file = folder / "net.bin"
    if change == "replaced":
        (folder / "new").write_bytes(b"others")
        (folder / "new").rename(file)
    elif change == "cut":
        os.truncate(file, 2)
    elif change == "removed":
        file.unlink()
    else:
        with file.open("r+b") as written:
            written.write(b"W")
    files.check()
    assert (files.file.read_bytes(), (Path(files.folder) / "labels.txt").read_text()) == (b"weights", "cat\ndog\n")
    if change != "removed":
        assert copied(look(folder), tmp_path / "store").folder != files.folder, "a load takes what is there now"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, 3),
    "empty": lambda file: os.truncate(file, 0),
    "of the same size": lambda file: file.write_bytes(b"wEights"),
    "missing": Path.unlink,
    "without its folder": lambda file: shutil.rmtree(file.parent),
    "a pipe": lambda file: replaced_by(file, os.mkfifo),
}


@pytest.mark.parametrize("again", ["opened", "mended"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_copy_is_made_once_and_a_damaged_one_again(folder: Path, tmp_path: Path, damage: str, again: str) -> None:
    files = copied(look(folder), tmp_path / "store")
    before = files.file.stat().st_ino
    same = copied(look(folder), tmp_path / "store")
    assert (same.folder, same.file.stat().st_ino) == (files.folder, before)
    files.file.chmod(0o600)
    DAMAGES[damage](files.file)
    with pytest.raises(WeightsError):
        files.check()
    if again == "opened":
        copied(look(folder), tmp_path / "store").check()
    else:
        mend(files)
    files.check()
    assert [each.name for each in (tmp_path / "store").iterdir()] == [Path(files.folder).name], "nothing else is left"
    (folder / "net.bin").write_bytes(b"others!")
    mend(files)
    files.check()
    files.file.unlink()
    with pytest.raises(WeightsError, match=r"its copy in .* is damaged, and cannot be made again from .*net\.bin: "):
        mend(files)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EACCES, "full"])
def test_without_a_place_for_copies_files_stay_where_they_are_and_must_stay_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Any
) -> None:
    def fails(*_: object) -> None:
        raise OSError(fault, os.strerror(fault))

    if fault == "full":
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    else:
        monkeypatch.setattr("models.weights.opened.os.fsync", fails)
    files = copied(look(folder), tmp_path / "store")
    assert not files.is_copy
    assert files.file == folder / "net.bin"
    assert "is served from where it lies" in caplog.text
    assert not list((tmp_path / "store").iterdir()), "nothing is left of it"
    files.check()
    (folder / "labels.txt").write_text("dog\ncat\n")
    with pytest.raises(WeightsError, match=re.escape(f"{folder / 'labels.txt'} has changed since")):
        files.check()
    replaced_by(folder / "labels.txt", lambda path: path.symlink_to("../secret"))
    with pytest.raises(WeightsError, match="link out of its folder"):
        files.check()


def test_a_file_that_is_written_meanwhile_is_refused(folder: Path, tmp_path: Path) -> None:
    files = look(folder)
    (folder / "net.bin").write_bytes(b"weightz")
    with pytest.raises(WeightsError, match="changed while it was read"):
        copied(files, tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())


def test_copies_that_nobody_holds_go_after_a_week_or_when_room_is_wanted(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    held = copied(look(folder), store)
    (folder / "net.bin").write_bytes(b"second")
    second = Path(copied(look(folder), store).folder)  # Nothing holds it once this is done.
    (folder / "net.bin").write_bytes(b"third")
    third = Path(copied(look(folder), store).folder)
    week_ago = time.time() - 8 * DAY_S
    for each in (Path(held.folder), second):
        os.utime(each, (week_ago, week_ago))
    remove_unused(store)
    assert [Path(held.folder).is_dir(), second.is_dir(), third.is_dir()] == [True, False, True]
    remove_unused(store, 1 << 62)
    assert [Path(held.folder).is_dir(), third.is_dir()] == [True, False]
    held.check()
