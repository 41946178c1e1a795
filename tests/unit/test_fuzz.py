"""Bytes of strangers: each reader answers or refuses, soon and in bounded memory, and never fails in a way of its own.

What is well formed is made first, then bent. What was found once stays in the examples of each test. `make fuzz` runs
the same tests for hours (ANYCHIP_TEST_FUZZ_EXAMPLES).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from anychip_grpc import messages
from anychip_grpc.messages import message
from app.errors import ServiceError
from app.http.call import read_images, read_query
from app.images.decoding import decode, sample_images
from app.images.header import ImageTooLargeError, InvalidImageError, check_pixels, read_header
from app.ingress.budget import Budget
from app.protocols import documents
from models.sample import IMAGES
from tests.support.images import passes

MOST_GROWTH_BYTES = 1 << 30
EXAMPLES = int(os.environ.get("ANYCHIP_TEST_FUZZ_EXAMPLES", "150"))
QUICK = settings(
    max_examples=EXAMPLES,
    deadline=timedelta(seconds=20),  # Generous, because the machine may be busy: what is not bounded takes hours.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SEEDS = [*sample_images(), min(IMAGES.glob("*.jpg"), key=lambda path: path.stat().st_size).read_bytes()]


@pytest.fixture(scope="module", autouse=True)
def _bounded() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MOST_GROWTH_BYTES, f"{grown >> 20} MiB more at its highest"


@contextmanager
def refusals() -> Iterator[None]:
    """Allow refusals of a client's mistake; a fault of ours, or any other exception, fails the test."""
    try:
        yield
    except ServiceError as error:
        if error.status >= 500:
            raise


Bend = Callable[[bytes], bytes]


def _set(place: float, byte: int) -> Bend:
    return lambda data: data[: (at := int(place * len(data)))] + bytes([byte]) + data[at + 1 :]


def _cut(place: float) -> Bend:
    return lambda data: data[: int(place * len(data))]


def _insert(place: float, more: bytes) -> Bend:
    return lambda data: data[: (at := int(place * len(data)))] + more + data[at:]


def _repeat(place: float, size: int, times: int) -> Bend:
    return lambda data: data[: (at := int(place * len(data)))] + data[at : at + size] * times + data[at:]


place = st.one_of(st.floats(0, 1), st.floats(0, 0.02))  # Headers are at the beginning.
bends = st.lists(
    st.one_of(
        st.builds(_set, place, st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)),
        st.builds(_cut, place),
        st.builds(_insert, place, st.binary(max_size=16)),
        st.builds(_repeat, place, st.integers(1, 64), st.sampled_from([1, 2, 300])),
    ),
    max_size=6,
)


def bent(data: bytes, how: list[Bend]) -> bytes:
    for bend in how:
        data = bend(data)
    return data


@QUICK
@given(st.sampled_from(SEEDS), bends)
@example(b"", [])
@example(b"BM" + bytes(60), [])
@example(b"GIF89a" + b"\xff" * 64, [])
@example(b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\xff" * 32, [])
@example(b"\xff\xd8" + b"\xff\xda\x00\x02" * 3000, [])
def test_images_are_passed_on_decoded_or_refused(seed: bytes, how: list[Bend]) -> None:
    data = bent(seed, how)
    passes(data)
    try:
        header = read_header(data)
        check_pixels(header, 1 << 20)
        pixels = decode(data, header)
    except (InvalidImageError, ImageTooLargeError):
        return
    assert pixels.shape == (header.height, header.width, 3)


def images_of(content_type: str, body: bytes) -> Any:
    lease = Budget(1 << 24, "bytes").lease("")
    converter: Any = SimpleNamespace(convert=None)
    headers = {b"content-type": content_type.encode("latin-1", "replace")}
    return asyncio.run(read_images(headers, body, 8, converter, lease))


boundary = st.text(alphabet="abcXYZ019'()+_,-./:=? ", min_size=1, max_size=70)
part = st.tuples(
    st.sampled_from(["file", "data", "", "a\r\nb", '"', "x" * 300]),
    st.sampled_from(["a.jpg", "", "../../etc/passwd", "é.png", '"\\"', None]),
    st.sampled_from(["image/jpeg", "text/plain; charset=none", "", None]),
    st.binary(max_size=40),
)


def multipart(name: str, parts: list[tuple[str, str | None, str | None, bytes]]) -> bytes:
    lines = []
    for field, file, kind, content in parts:
        head = f'--{name}\r\nContent-Disposition: form-data; name="{field}"'
        head += "" if file is None else f'; filename="{file}"'
        head += "" if kind is None else f"\r\nContent-Type: {kind}"
        lines.append(head.encode("utf-8") + b"\r\n\r\n" + content + b"\r\n")
    return b"".join(lines) + f"--{name}--\r\n".encode()


@QUICK
@given(boundary, st.lists(part, max_size=10), bends, st.sampled_from(["", '"', ";", "; charset=utf-7", "=?"]))
@example("x", [("f", "a", None, b"")] * 10, [], "")
@example("x", [("f", "a", None, b"abc")] * 2, [_cut(0.8)], "")  # A part without an end was left open.
def test_forms_are_read_or_refused(name: str, parts: list[Any], how: list[Bend], more: str) -> None:
    with refusals():
        found = images_of(f"multipart/form-data; boundary={name}{more}", bent(multipart(name, parts), how))
        assert 0 < len(found) <= 8


instances = st.fixed_dictionaries(
    {
        "instances": st.lists(
            st.fixed_dictionaries({"b64": st.binary(max_size=9).map(base64.b64encode).map(bytes.decode)})
        )
    }
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@QUICK
@given(instances | anything | st.fixed_dictionaries({"instances": anything}), bends)
@example({"instances": [{"b64": "="}]}, [])
@example({"instances": [{"url": "http://169.254.169.254/"}]}, [])
def test_instances_are_read_or_refused(document: Any, how: list[Bend]) -> None:
    with refusals():
        found = images_of("application/json", bent(json.dumps(document).encode(), how))
        assert 0 < len(found) <= 8


shape = st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**62, 2**63, 10**30]) | anything, max_size=5)
tensor = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["image", "input", ""]) | anything,
        "datatype": st.sampled_from(["FP32", "UINT8", "BYTES", "FP16", "BOOL", "INT64", "x"]) | anything,
        "shape": shape | anything,
        "data": st.lists(st.integers() | st.floats() | st.text(max_size=4), max_size=6) | anything,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 40) | anything})
        | anything,
    },
)


@QUICK
@given(st.fixed_dictionaries({"inputs": st.lists(tensor, max_size=3) | anything}), st.binary(max_size=40), bends)
@example({"inputs": [{"name": "i", "datatype": "FP32", "shape": [0, 2**62, 2**62, 3], "data": []}]}, b"", [])
@example({"inputs": [{"name": "i", "datatype": "BYTES", "shape": [2], "data": ["x", "a" * 9]}]}, b"", [])
@example({"inputs": [{"name": "i", "datatype": "BYTES", "shape": [1]}]}, b"\xff\xff\xff\xff", [])
def test_binary_framing_is_read_or_refused(document: Any, rest: bytes, how: list[Bend]) -> None:
    head = json.dumps(document).encode()
    for header_bytes in (None, len(head), 0, len(head) + len(rest) + 1):
        with refusals():
            documents.read_tensors(bent(head + rest, how), header_bytes)


def infer_request(name: str, shapes: list[list[int]], datatype: str, raw: list[bytes], numbers: list[int]) -> bytes:
    request = message("ModelInferRequest")(model_name=name, id=name)
    for each in shapes:
        given_ = request.inputs.add(name=name, datatype=datatype, shape=each)
        given_.contents.int_contents.extend(numbers)
    request.raw_input_contents.extend(raw)
    return bytes(request.SerializeToString())


@QUICK
@given(
    st.text(max_size=6),
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=4),
    st.sampled_from(["INT32", "FP32", "BYTES", ""]),
    st.lists(st.binary(max_size=20), max_size=4),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    bends,
)
def test_messages_are_read_or_refused(
    name: str, shapes: list[list[int]], datatype: str, raw: list[bytes], numbers: list[int], how: list[Bend]
) -> None:
    data = bent(infer_request(name, shapes, datatype, raw, numbers), how)
    with refusals():
        messages.raw_form(data, 0)
        messages.parsed(*messages.split(data))


@QUICK
@given(st.dictionaries(st.sampled_from(["top_k", "score_threshold", "timeout_ms", "x"]), st.text(max_size=8)), bends)
@example({"top_k": "1e999"}, [])
@example({"score_threshold": "nan"}, [])
@example({"timeout_ms": "1" * 5000}, [])
def test_queries_are_read_or_refused(query: dict[str, str], how: list[Bend]) -> None:
    with refusals():
        read_query(bent("&".join(f"{name}={value}" for name, value in query.items()).encode(), how))
