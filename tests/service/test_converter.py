"""Large requests are converted in another process, which may fail, die or be left without harm."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal

import numpy as np
import pytest

from app.errors import ServiceError
from app.ingress import converter as converter_module
from app.ingress.converter import Converter
from app.protocols import documents


@pytest.fixture
async def converter():
    converter = Converter()
    yield converter
    await converter.close()


def instances(*contents):
    return json.dumps({"instances": [{"b64": base64.b64encode(content).decode()} for content in contents]}).encode()


def images_in(converted):
    return [bytes(each) for each in documents.unpack(converted)[1]]


async def test_images_come_back_as_they_were(converter):
    contents = [os.urandom(3_000_000), b"x"]
    assert images_in(await converter.convert(documents.packed_instances, 2, instances(*contents))) == contents


async def test_mistakes_are_the_clients_and_end_nobody(converter):
    for body, text in ((b"[" * 100_000, "not JSON"), (instances(b"1", b"2"), "more than the 1"), (b"{}", "instances")):
        with pytest.raises(ServiceError, match=text) as caught:
            await converter.convert(documents.packed_instances, 1, body)
        assert caught.value.code == "INVALID_REQUEST"
    [child] = converter._children
    assert child.process.poll() is None


async def test_a_child_that_reads_and_writes_as_fast_as_we_do_keeps_nobody_waiting(converter, monkeypatch):
    loop, sent, received, turns = asyncio.get_running_loop(), [], [], 0

    async def taken(_socket, view):
        sent.append(len(view))

    async def given(_socket, view):
        received.append(len(view))
        view[:] = bytes(len(view))
        return len(view)

    async def others():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    await converter.convert(documents.packed_instances, 1, instances(b"x"))  # The process is there.
    [child] = converter._children
    monkeypatch.setattr(loop, "sock_sendall", taken)
    monkeypatch.setattr(loop, "sock_recv_into", given)
    waiting = asyncio.create_task(others())
    await child._ask(documents.packed_instances, 1, bytes(20 << 20))
    assert sent[1:] == [1 << 20] * 20
    assert turns >= 19
    turns = 0
    await child._received(20 << 20)
    assert received[1:] == [1 << 20] * 20
    assert turns >= 19
    waiting.cancel()


async def converting(converter, *signals):
    """Begin a conversion in a stopped child, then send the child these signals."""
    await converter.convert(documents.packed_instances, 1, instances(b"x"))
    [child] = converter._children
    os.kill(child.process.pid, signal.SIGSTOP)
    waiting = asyncio.ensure_future(converter.convert(documents.packed_instances, 1, instances(b"y")))
    await asyncio.sleep(0)
    for number in signals:
        os.kill(child.process.pid, number)
    return waiting


async def test_a_child_that_dies_takes_only_its_own_request(converter):
    waiting = await converting(converter, signal.SIGSEGV, signal.SIGCONT)
    with pytest.raises(ServiceError, match="too complex"):
        await waiting
    assert images_in(await converter.convert(documents.packed_instances, 1, instances(b"z"))) == [b"z"]


@pytest.mark.parametrize("signals", [(signal.SIGKILL,), ()])
async def test_a_child_that_was_killed_or_stopped_by_others_takes_nothing(converter, monkeypatch, signals):
    monkeypatch.setattr(converter_module, "_LOOK_INTERVAL_S", 0.05)
    waiting = await converting(converter, *signals)
    assert images_in(await asyncio.wait_for(waiting, 60)) == [b"y"]


async def test_children_that_were_all_stopped_take_nothing(converter, monkeypatch):
    """Two wait for work, and somebody stops both: the request goes to one, and then to a third."""
    monkeypatch.setattr(converter_module, "_LOOK_INTERVAL_S", 0.05)
    large = instances(os.urandom(3_000_000))
    await asyncio.gather(
        converter.convert(documents.packed_instances, 1, large), converter.convert(documents.packed_instances, 1, large)
    )
    assert len(converter._children) == 2
    for child in converter._children:
        child.process.send_signal(signal.SIGSTOP)
    waiting = converter.convert(documents.packed_instances, 1, instances(b"y"))
    assert images_in(await asyncio.wait_for(waiting, 60)) == [b"y"]


async def test_a_request_whose_children_are_all_killed_is_refused(converter, monkeypatch):
    killed = []

    async def ask(child, *_):
        child.process.kill()
        killed.append(child)
        raise EOFError

    monkeypatch.setattr(converter_module._Child, "ask", ask)
    with pytest.raises(ServiceError, match="too complex"):
        await converter.convert(documents.packed_instances, 1, instances(b"y"))
    assert len(killed) == 2
    assert converter._children == set()


async def test_who_leaves_ends_the_work(converter):
    body = json.dumps({"inputs": [[1.5] * 2_000_000]}).encode()
    waiting = asyncio.ensure_future(converter.convert(documents.packed_tensors, 0, body))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert images_in(await converter.convert(documents.packed_instances, 1, instances(b"z"))) == [b"z"]


async def test_numbers_of_an_answer_are_the_same_as_written_here(converter):
    numbers = np.linspace(-1, 1, 200_000, dtype=np.float32)
    document = {"outputs": [{"name": "x", "datatype": "FP32", "data": None}, {"name": "y", "data": ["a"]}]}
    packed = documents.pack(document, [numbers.tobytes()], limited=False)
    answer = json.loads(bytes(await converter.convert(documents.write_outputs, 0, packed)))
    assert np.array_equal(np.array(answer["outputs"][0]["data"], np.float32), numbers)
    assert answer["outputs"][1]["data"] == ["a"]
