"""The channel between the server and a worker: whole messages in order, and neither end ever waits for the other."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.processes.channel import MAX_MESSAGE_BYTES, MAX_WAITING_BYTES, Channel, ChannelError, Talk, socket_pair


class Pair:
    """Both ends, in one thread."""

    def __init__(self, buffer_bytes=None):
        ours, theirs = socket_pair()
        if buffer_bytes:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.raw = ours
        self.ours, self.theirs = Channel(ours), Channel(theirs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ours.close()
        self.theirs.close()

    def drain(self):
        heard = []
        while self.ours.waiting or self.theirs.wait(0)[0]:
            self.ours.flush()
            heard += self.theirs.receive()
        return heard


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=3000) | st.integers(0, 300_000).map(bytes), max_size=20), st.booleans())
def test_messages_of_any_size_arrive_whole_and_in_order(messages, small):
    with Pair(4096 if small else None) as pair:
        for message in messages:
            pair.ours.send(message)
        assert pair.drain() == messages


def test_what_waits_is_bounded():
    def flood(channel):
        for _ in range(100):
            channel.send(bytes(MAX_MESSAGE_BYTES))
            assert channel._waiting_bytes <= MAX_WAITING_BYTES

    with Pair() as pair, pytest.raises(ChannelError, match="does not read"):
        flood(pair.ours)


def test_a_message_too_long_is_refused_by_both_ends():
    with Pair() as pair:
        with pytest.raises(ChannelError, match="too long"):
            pair.ours.send(bytes(MAX_MESSAGE_BYTES + 1))
        pair.raw.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
        with pytest.raises(ChannelError, match="was announced"):
            pair.theirs.receive()


def test_descriptors_travel_with_their_messages():
    with Pair(4096) as pair:
        pair.ours.send(bytes(100_000))  # What follows has to wait.
        for text in (b"one", b"two"):
            read, write = os.pipe()
            os.write(write, text)
            os.close(write)
            pair.ours.send(text, (read,))
        assert pair.drain()[1:] == [b"one", b"two"]
        for text in (b"one", b"two"):
            descriptor = pair.theirs.take_descriptor()
            assert os.read(descriptor, 10) == text
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
        with pytest.raises(ChannelError, match="missing"):
            pair.theirs.take_descriptor()


def test_descriptors_that_nobody_asked_for_are_bounded_and_closed():
    def flood(pair):
        for _ in range(20):
            pair.ours.send(b"x", (os.open(os.devnull, os.O_RDONLY),))
            pair.theirs.receive()

    before = len(os.listdir("/proc/self/fd"))
    with Pair() as pair, pytest.raises(ChannelError, match="too many"):
        flood(pair)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_end_is_heard_after_the_last_words():
    with Pair() as pair:
        pair.ours.send(b"last words")
        pair.ours.close()
        assert pair.theirs.receive() == [b"last words"]
        with pytest.raises(EOFError):
            pair.theirs.receive()
        with pytest.raises(OSError, match="pipe"):
            pair.theirs.send(b"too late")


async def test_what_waited_before_a_talk_is_sent_by_it():
    """As the first message to a process, whose environment may be larger than the socket takes at once."""
    ours, theirs = map(Channel, socket_pair())
    ours.send(bytes(2_000_000))
    assert ours.waiting
    talk, heard = Talk(ours, int, lambda _: None), []
    while not heard:
        await asyncio.to_thread(theirs.wait, 10)
        heard = theirs.receive()
    assert [*map(len, heard)] == [2_000_000]
    talk.end("")
    theirs.close()
