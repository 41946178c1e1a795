"""Who begins in which turn of the event loop."""

from __future__ import annotations

import asyncio

from app.ingress.pacing import Pacing


async def test_as_many_begin_in_a_turn_as_may_and_in_their_order():
    turns, begun = Pacing(3), []

    async def one(number):
        await turns.take()
        begun.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(10)]
    most, before = 0, 0
    while len(begun) < 10:
        await asyncio.sleep(0)
        most, before = max(most, len(begun) - before), len(begun)
    await asyncio.gather(*tasks)
    assert begun == list(range(10))
    assert most == 3


async def test_who_leaves_takes_nobodys_turn():
    turns, begun = Pacing(1), []

    async def one(number):
        await turns.take()
        begun.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [0, 4]
    await asyncio.wait_for(turns.take(), 1)
