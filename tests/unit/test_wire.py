"""Tensors on the wire: every type there and back, and nothing but a refusal for what does not fit."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from app.errors import ServiceError
from app.http.call import as_large_json
from app.http.routes.infer import _as_json
from app.protocols import wire
from app.protocols.open_inference import results, size_bytes
from app.protocols.wire import RequestedOutput


def attempt(read, *arguments):
    """Read something; None if that is refused. Any other failure fails the test."""
    with contextlib.suppress(ServiceError):
        return read("x", *arguments)
    return None


TENSORS = st.sampled_from(sorted(wire.DATATYPES)).flatmap(
    lambda datatype: arrays.arrays(wire.DATATYPES[datatype], arrays.array_shapes(max_side=4)).map(
        lambda array: (datatype, array)
    )
)


@given(TENSORS)
def test_bytes_there_and_back(tensor):
    datatype, array = tensor
    content = wire.to_bytes(array)
    assert len(content) == array.nbytes
    back = wire.from_bytes("x", datatype, array.shape, content)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert wire.datatype_of(back) == datatype


@given(TENSORS)
def test_values_there_and_back(tensor):
    datatype, array = tensor
    if datatype == "FP16":
        return  # Has no form in JSON.
    for values in (array.tolist(), array.reshape(-1).tolist()):
        back = wire.from_values("x", datatype, array.shape, values)
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


def test_whole_numbers_may_be_written_with_a_point():
    back = wire.from_values("x", "UINT8", (3,), [1.0, 2, 255.0])
    assert (back.tolist(), back.dtype) == ([1, 2, 255], np.uint8)
    for wrong in (0.5, 256.0, -1.0, 1e300):
        with pytest.raises(ServiceError, match="UINT8"):
            wire.from_values("x", "UINT8", (1,), [wrong])


def test_lists_are_nested_as_their_shape_or_refused():
    pairs = [[1, 2, 3], [4, 5, 6]]
    for shape in ((2, 3), (1, 2, 3), (2, 1, 3, 1)):
        assert wire.from_values("x", "FP32", shape, pairs).reshape(2, 3).tolist() == pairs
    assert wire.from_values("x", "FP32", (2, 3, 1), [*range(6)]).shape == (2, 3, 1)
    for shape in ((3, 2), (6,), (1, 3, 2)):
        with pytest.raises(ServiceError, match=r"nested as \[2, 3\], but its shape"):
            wire.from_values("x", "FP32", shape, pairs)


def test_json_holds_no_infinity_in_either_direction():
    with pytest.raises(ServiceError, match="beyond FP32"):
        wire.from_values("x", "FP32", (1,), [1e39])
    for held, datatype in ((np.float32(np.inf), "FP32"), (np.float16(1), "FP16")):
        with pytest.raises(ServiceError, match="no form in JSON; ask for it with binary_data"):
            _as_json(wire.OutputTensor("y", datatype, (1,), np.array([held])))


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_elements_there_and_back(elements):
    content = wire.to_bytes(elements)
    assert [bytes(each) for each in wire.elements("x", len(elements), content)] == elements
    if elements:
        with pytest.raises(ServiceError):
            wire.elements("x", len(elements) - 1, content)
        with pytest.raises(ServiceError):
            wire.elements("x", len(elements), content[:-1] if elements[-1] else content[:-4] + b"\1\0\0\0")


@given(st.sampled_from(sorted(wire.DATATYPES)), st.lists(st.integers(0, 2**63 - 1), max_size=4), st.binary(max_size=40))
def test_bytes_that_do_not_fit_are_refused_before_memory_is_taken(datatype, shape, content):
    array = attempt(wire.from_bytes, datatype, shape, content)
    assert array is None or array.nbytes == len(content)


def test_a_byte_that_is_no_truth_value_is_true():
    assert wire.from_bytes("x", "BOOL", (3,), b"\0\1\7").tolist() == [False, True, True]


def test_lengths_are_little_endian():
    assert wire.to_bytes([b"ab"]) == struct.pack("<I", 2) + b"ab"
    assert wire.to_bytes(np.array([1], ">i4")) == b"\1\0\0\0"


def test_shorter_rows_are_filled_up_with_zeros():
    batch = wire.stacked([np.ones((2, 3)), np.ones((0, 3)), np.ones((1, 3))])
    assert batch.shape == (3, 2, 3)
    assert batch.sum(axis=(1, 2)).tolist() == [6, 0, 3]


def test_rows_are_stacked_whoever_does_it():
    rows = [np.full((2, 3), number, np.float32) for number in range(4)]
    assert size_bytes(rows) == size_bytes(np.stack(rows)) == 96
    assert size_bytes([b"abc", b"d"]) == 4
    found = results([RequestedOutput("x"), RequestedOutput("predictions")], {"x": rows, "predictions": [b"a"]}, None)
    assert np.array_equal(found[0].data, np.stack(rows))
    assert (found[0].shape, found[1].shape, found[1].data) == ((4, 2, 3), (1,), [b"a"])


def test_entries_that_are_written_one_by_one_make_the_same_json():
    written = []

    class Threads:
        async def offload(self, function, *arguments):
            written.append(arguments)
            return function(*arguments)

    for entries in ([{"embedding": "AAAA"}, {"embedding": 'a"b'}], [{}]):
        written.clear()
        body, headers = asyncio.run(as_large_json(Threads(), entries, b'{"x":', b"}"))
        assert orjson.loads(body) == {"x": entries}
        assert dict(headers)[b"content-length"] == b"%d" % len(body)
        assert [each for each, *_ in written[:-1]] == entries
