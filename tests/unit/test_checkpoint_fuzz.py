"""Fuzzed weight files: models.weights.unpickle and checkpoint answer or refuse, soon and in little memory."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zipfile
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.contract.errors import WeightsError
from models.weights.checkpoint import read

TRIED = settings(
    max_examples=int(os.environ.get("ANYCHIP_TEST_FUZZ_EXAMPLES", "300")),
    deadline=timedelta(seconds=20),  # Generous, because the machine may be busy: what is not bounded takes hours.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

NAMES = [
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch", "FloatStorage"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "getattr"),
    ("torch.nn.modules.linear", "Linear"),
    ("os", "system"),
]
WORDS = ["_modules", "_parameters", "_buffers", "model", "names", "storage", "0", "cpu", "weight", "x" * 600]


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


memo = st.integers(0, 3)
instruction = st.one_of(
    st.sampled_from([b")", b"]", b"}", b"(", b"N", b"\x88", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u"]),
    st.sampled_from([b"R", b"\x81", b"b", b"Q", b"0", b"\x93", b"\x94"]),
    st.sampled_from([f"c{module}\n{name}\n".encode() for module, name in NAMES]),
    st.sampled_from(WORDS).map(text),
    st.integers(0, 255).map(lambda number: b"K" + bytes([number])),
    st.integers(-(2**31), 2**31 - 1).map(lambda number: b"J" + struct.pack("<i", number)),
    memo.map(lambda number: b"q" + bytes([number])),
    memo.map(lambda number: b"h" + bytes([number])),
)
block = st.lists(instruction, max_size=12).map(b"".join)
# Blocks repeated: what grows at every repetition shows.
programs = st.lists(st.tuples(block, st.sampled_from([1, 1, 2, 60, 3000])), max_size=8).map(
    lambda parts: b"\x80\x02" + b"".join(code * times for code, times in parts) + b"."
)


def archive(path: Path, program: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", program)
        file.writestr("a/byteorder", b"little")
        file.writestr("a/data/0", bytes(64))
    return path


def tried(path: Path) -> None:
    for reader in (read, partial(read, with_data=False)):
        with contextlib.suppress(WeightsError):  # Any other error fails the test.
            assert reader(path).state


def saved() -> bytes:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    stream = io.BytesIO()
    torch.save({"model": network, "names": {0: "cat", 1: "dog"}, "epoch": 3}, stream)
    return stream.getvalue()


SAVED = saved()
PICKLED = zipfile.ZipFile(io.BytesIO(SAVED)).read("archive/data.pkl")
changes = st.lists(st.tuples(st.integers(0, len(SAVED) - 1), st.integers(0, 255)), min_size=1, max_size=8)


@TRIED
@given(program=programs)
def test_any_pickle_is_read_or_refused(tmp_path: Path, program: bytes) -> None:
    tried(archive(tmp_path / "a.pt", program))


@TRIED
@given(edits=changes)
def test_any_changed_file_is_read_or_refused(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    content, pickled = bytearray(SAVED), bytearray(PICKLED)
    for place, value in edits:
        content[place] = value
        pickled[place % len(pickled)] = value
    (tmp_path / "b.pt").write_bytes(content)
    tried(tmp_path / "b.pt")
    tried(archive(tmp_path / "c.pt", bytes(pickled)))
