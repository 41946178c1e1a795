"""Results on their way to the server: what was written is read, wherever it lies, and nothing else is believed."""

from __future__ import annotations

import contextlib
import fcntl
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.processes.channel import reader, to_packet
from app.worker.messages import Done, FromWorker
from app.worker.results import SMALL_BYTES, ResultError, map_large, read_results, write_results

DTYPES = ("f4", "f8", "f2", "i8", "i4", "u1", "b1", "c8")


def across(message):
    [read] = reader(FromWorker)(to_packet((message,)))
    return read


def sent(results):
    """Through a message, and memory if they are large, as they travel."""
    layouts, small, size, descriptor = write_results(results)
    done = across(Done(1, layouts, 0.1, 0, size, small=small))
    return read_results(done.results, len(results), map_large(descriptor, size) if size else done.small)


def same(one, other):
    if one is None or other is None:
        return one is other
    pairs = list(zip(one, other, strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


SHAPES = st.lists(st.integers(0, 12), max_size=3).map(tuple) | st.tuples(st.integers(1000, 4000))


@st.composite
def arrays(draw):
    shape, dtype = draw(SHAPES), np.dtype(draw(st.sampled_from(DTYPES)))
    content = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, shape)
    return content.astype(dtype)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.none() | st.lists(arrays(), max_size=4).map(tuple), min_size=1, max_size=6)
    | st.lists(arrays(), max_size=4).flatmap(lambda one: st.integers(1, 6).map(lambda count: [tuple(one)] * count))
)
def test_what_is_written_is_read(results):
    got = sent(results)
    assert len(got) == len(results)
    assert all(map(same, got, results))


def test_what_is_small_together_is_in_the_message_and_lies_nowhere_else():
    half = np.ones(SMALL_BYTES // 2, np.uint8)
    layouts, small, size, descriptor = write_results([(half,), (half,)])
    assert (len(small), size, descriptor) == (SMALL_BYTES, 0, -1)
    for short in (small[:-1], b""):
        with pytest.raises(ResultError):
            read_results(layouts, 2, short)


def test_as_many_results_as_items_are_read_and_no_others():
    """One layout is for all of them."""
    assert read_results((None,), 2, b"") == [None, None]
    for layouts in ((), (None, None, None)):
        with pytest.raises(ResultError):
            read_results(layouts, 2, b"")


def test_large_results_leave_no_descriptor_behind_and_a_task_may_write_to_any():
    before = len(os.listdir("/proc/self/fd"))
    large = np.arange(1_000_000, dtype=np.float32)
    [(got,), (small,)] = sent([(large,), (large[:5],)])
    assert (got == large).all()
    assert (small == large[:5]).all()
    got += 1
    [(other,)] = sent([(large[:5],)])
    other += 1
    assert (got[:5] == other).all()
    del got, small  # Until then its memory is mapped, and Python keeps a descriptor of that.
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_sent_is_refused():
    for array in (np.array([object()]), np.array(["text"]), np.zeros(2, [("a", "f4")])):
        with pytest.raises(ResultError):
            write_results([(array,)])


@pytest.mark.parametrize(
    "layout",
    [(("O", (1,)),), (("f4,f4", (1,)),), (("<f4", (-1,)),), (("<f4", (1 << 40,)),), (("<f4", (1 << 62, 1 << 62)),)],
)
def test_a_layout_that_makes_no_sense_is_refused(layout):
    with pytest.raises(ResultError):
        read_results([layout], 1, np.zeros(4096, np.uint8))


def test_memory_that_could_shrink_or_is_too_small_is_refused():
    for seals, size in ((False, 4096), (True, 8192), (True, 0), (True, 1 << 62)):
        descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 4096)
        if seals:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(ResultError):
            map_large(descriptor, size)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_value_error(data):
    with contextlib.suppress(ValueError):
        reader(FromWorker)(data)
