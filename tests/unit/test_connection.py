"""Answers leave in one piece, large ones without being held back."""

from __future__ import annotations

import asyncio

from app.http.connection import _OnePiece


class Wire:
    def __init__(self):
        self.sent = []
        self.closed = False

    def write(self, data):
        assert not self.closed
        self.sent.append(data)

    def close(self):
        self.closed = True

    def get_extra_info(self, name):
        return f"the {name}"


async def test_what_is_written_in_one_turn_leaves_together():
    wire = Wire()
    transport = _OnePiece(wire)
    transport.write(b"head ")
    transport.write(b"body")
    assert wire.sent == []
    await asyncio.sleep(0)
    assert wire.sent == [b"head body"]
    transport.write(b"next")
    await asyncio.sleep(0)
    assert wire.sent == [b"head body", b"next"]


async def test_much_is_not_held_back():
    wire = Wire()
    transport = _OnePiece(wire)
    transport.write(b"head ")
    transport.write(bytes(100_000))
    assert [len(data) for data in wire.sent] == [100_005]
    await asyncio.sleep(0)
    assert len(wire.sent) == 1


async def test_closing_sends_what_is_left_and_nothing_after():
    wire = Wire()
    transport = _OnePiece(wire)
    transport.write(b"last words")
    transport.close()
    assert wire.sent == [b"last words"]
    await asyncio.sleep(0)
    assert wire.sent == [b"last words"]


async def test_everything_else_is_the_transport_within():
    assert _OnePiece(Wire()).get_extra_info("peername") == "the peername"
