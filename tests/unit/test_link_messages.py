"""What an ingress and the owner say to each other: it comes as it was said, and lies are found out."""

from __future__ import annotations

import contextlib
import math
import os
import socket

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.link import Frame, Regions, TensorRow
from app.link_messages import At, EncodedAt, ItemFailed, SentError, ToOwner, found, placed
from app.observability.counter_deltas import add, counter_deltas
from app.observability.metrics import Metrics, ModelMetrics
from app.observability.triton_statistics import ModelStatistics
from app.processes.arena import ROOM, Blocks, open_blocks
from app.processes.channel import Channel, Talk, socket_pair
from models.contract.cascade import Region


def there_and_back(content):
    blocks = Blocks(ROOM << 16)
    at = placed(content, blocks.write)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(at), type=At)
    return found(sent, open_blocks(os.dup(blocks.descriptor)))


def test_what_fills_a_slot_arrives_as_it_was():
    assert bytes(there_and_back(b"abc")) == b"abc"
    parts = there_and_back(Regions(bytearray(b"abcd"), [Region(1, 2, 3, 4), Region(0, 0, 1, 1, 2, (0.5,) * 8)]))
    assert bytes(parts.image) == b"abcd"
    assert parts.regions == (Region(1, 2, 3, 4), Region(0, 0, 1, 1, 2, (0.5,) * 8))
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)[::-1]
    frame = there_and_back(Frame(pixels, 4, 2, placed=False))
    assert (frame.width, frame.height, frame.placed) == (4, 2, False)
    np.testing.assert_array_equal(frame.pixels, pixels)
    row = there_and_back(TensorRow({"x": np.float32([[1, math.nan]]), "y": np.int64(3).reshape(1)}))
    np.testing.assert_array_equal(row.inputs["x"], np.float32([[1, math.nan]]))
    assert row.inputs["y"].dtype == np.int64


@pytest.mark.parametrize("region", [Region(0, 0, 1, 1, 0, (0.5,) * 9), Region(1 << 32, 0, 1, 1), Region(0, 0, -1, 1)])
def test_a_region_has_bounds(region):
    """It is written beside its image into a decoder's memory, where another image follows."""
    with pytest.raises(msgspec.ValidationError):
        there_and_back(Regions(b"abcd", [region]))


@given(start=st.integers(-5, 20), size=st.integers(-5, 20))
def test_nothing_outside_of_the_memory_is_read(start, size):
    memory = memoryview(bytes(range(10)))
    if start >= 0 and size >= 0 and start + size <= 10:
        assert bytes(found(EncodedAt(start, size), memory)) == bytes(range(10))[start : start + size]
    else:
        with pytest.raises(ValueError, match="outside"):
            found(EncodedAt(start, size), memory)


@given(st.lists(st.tuples(st.integers(1, 1 << 16), st.booleans()), max_size=60))
def test_blocks_in_use_never_overlap(steps):
    """And as long as no more is in use than was said, there is always one."""
    blocks, used, limit = Blocks(ROOM << 17), [], 1 << 17
    for number, (size, takes) in enumerate(steps):
        if takes and sum(each for _, each, _ in used) + size <= limit:
            data = bytes([number % 256]) * size
            used.append((blocks.write(data), size, data))
        elif used:
            blocks.give(*used.pop(number % len(used))[:2])
        memory = open_blocks(os.dup(blocks.descriptor))
        assert all(memory[start : start + len(data)] == data for start, _, data in used)


def talks(handle):
    ours, theirs = socket_pair()
    return Talk(Channel(ours), ToOwner, handle), Channel(theirs), theirs


@pytest.mark.parametrize(
    "sent", [b"\xc1", msgspec.msgpack.encode([["Nothing"]]), msgspec.msgpack.encode([["Ask", "x"]])]
)
async def test_what_cannot_be_read_ends_the_talk(sent):
    talk, other, _ = talks(lambda message: None)
    with contextlib.closing(other):
        other.send(sent)
        assert "cannot be read" in await talk.ended


async def test_who_does_not_read_costs_memory_up_to_a_limit_and_then_the_talk():
    talk, other, theirs = talks(lambda message: None)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for number in range(200_000):
        talk.say(ItemFailed(number, SentError("INTERNAL", "x" * 400, None)), 400)
        if talk.ended.done():
            break
    assert "does not read" in await talk.ended
    other.close()


@given(st.lists(st.tuples(st.sampled_from(["OK", "QUEUE_FULL"]), st.floats(0, 20)), max_size=20), st.integers(0, 20))
def test_what_two_processes_have_counted_is_what_one_would_have(requests, cut):
    def counted(metrics, statistics, some):
        model = ModelMetrics(metrics, "m")
        for code, seconds in some:
            model.answered(code, seconds, {"trace_id": "1"})
            statistics.request(code, seconds, {"decode": seconds})
            statistics.images += 1
            metrics.clients.count("c", refused=code != "OK")

    def shown(metrics):
        lines = metrics.render("")[0].decode().splitlines()
        return [line for line in lines if line.startswith(("anychip_request", "anychip_client"))]

    one, other, alone = Metrics(), Metrics(), Metrics()
    mine, theirs, whole = ModelStatistics(), ModelStatistics(), ModelStatistics()
    counted(one, mine, requests[:cut])
    counted(other, theirs, requests[cut:])
    counted(alone, whole, requests)
    content = counter_deltas(other, {"m": theirs})
    add(content, one, {"m": mine}, {"model": ("m",)})
    add(counter_deltas(other, {"m": theirs}), one, {"m": mine}, {"model": ("m",)})  # There is nothing more.

    def near(lines):
        return [(each.rpartition(" ")[0], pytest.approx(float(each.rpartition(" ")[2]))) for each in lines]

    assert [(each.rpartition(" ")[0], float(each.rpartition(" ")[2])) for each in shown(one)] == near(shown(alone))
    assert mine.success.count == whole.success.count
    assert mine.images == whole.images
    assert theirs == ModelStatistics()
