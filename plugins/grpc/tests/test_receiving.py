"""Large bodies and messages, which the event loop must not read in one go."""

from __future__ import annotations

import asyncio

import pytest

from anychip_grpc import receiving
from anychip_grpc.receiving import Receiver
from app.http import call
from app.ingress.budget import Budget
from app.ingress.converter import Converter

MB = 1 << 20
FILE = b'--b\r\ncontent-disposition: form-data; name="f"; filename="f"\r\n\r\n'
END = b"\r\n--b--\r\n"


@pytest.mark.parametrize(
    "parts", [[b"\r" * 8 * MB], [b"\r\n--" * 2 * MB], [b"x", b"\r" * 8 * MB]], ids=["one part", "almost ends", "two"]
)
async def test_the_loop_goes_on_while_a_large_form_is_read(parts):
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    whole = b"\r\n".join(FILE + part for part in parts) + END
    headers = {b"content-type": b"multipart/form-data; boundary=b"}
    found = await call.read_images(headers, whole, 4, None, None)
    counting.cancel()
    assert [bytes(each) for each in found] == parts
    assert turns >= 7  # Once for each megabyte but the first.


# The first piece that is parsed begins with the body, the first that is searched at the end of the part's head.
@pytest.mark.parametrize("begin", [0, len(FILE) - 4], ids=["parsed", "searched"])
@pytest.mark.parametrize("at", range(-2, 12))
async def test_a_boundary_across_two_pieces_is_found(begin, at):
    before = begin + call._PIECE_BYTES - len(FILE) - at
    parts = [b"x" * before, b"z"]
    whole = b"\r\n".join(FILE + part for part in parts) + END
    found = await call.read_images({b"content-type": b"multipart/form-data; boundary=b"}, whole, 4, None, None)
    assert [bytes(each) for each in found] == parts


class Message:
    """A gRPC call's one message, which comes when the test says so."""

    open = 0

    def __init__(self):
        self.asked = asyncio.Event()
        self.comes = asyncio.get_running_loop().create_future()

    def __aiter__(self):
        return self

    async def __anext__(self):
        Message.open += 1
        self.asked.set()
        try:
            return await self.comes
        finally:
            Message.open -= 1


@pytest.fixture
def receiver():
    Message.open = 0
    return Receiver(20 * MB, Converter(), Budget(10, "calls"), Budget(100 * MB, "bytes"))


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_large_messages_come_one_after_the_other(receiver, monkeypatch):
    monkeypatch.setattr(receiving, "_TURN_S", 1000)
    messages = [Message() for _ in range(5)]
    reading = [asyncio.create_task(receiver._in_turn(each)) for each in messages]
    for message in messages:
        await message.asked.wait()
        await settled()
        assert Message.open == 1
        message.comes.set_result(bytes(2 * MB))
    assert [len(data) for data in await asyncio.gather(*reading)] == [2 * MB] * 5


async def test_who_sends_nothing_holds_nobody_up_for_long(receiver):
    silent, other = Message(), Message()
    waiting = asyncio.create_task(receiver._in_turn(silent))
    await silent.asked.wait()
    other.comes.set_result(b"x")
    assert await receiver._in_turn(other) == b"x"
    assert not silent.comes.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not receiver._turn.locked()


async def test_small_messages_wait_for_nobody(receiver, monkeypatch):
    monkeypatch.setattr(receiving, "_TURN_S", 1000)
    for _ in range(20):  # Until it is known that messages are small.
        small = Message()
        small.comes.set_result(b"x")
        await receiver._in_turn(small)
    messages = [Message() for _ in range(5)]
    reading = [asyncio.create_task(receiver._in_turn(each)) for each in messages]
    await settled()
    assert Message.open == 5
    for message in messages:
        message.comes.set_result(b"x")
    await asyncio.gather(*reading)
