"""Who begins in which turn of the event loop."""

from __future__ import annotations

import asyncio

from app.ingress.pacing import Pacing


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
    await asyncio.wait_for(turns.take(), 60)
