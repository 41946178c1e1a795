"""What clients lease: nobody takes more than there is, and one client leaves room for others."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import ServiceError
from app.http.edge import Pacing
from app.ingress.budget import Budget, Trim
from tests.support.doubles import turns


def taken(budget, client, size):
    try:
        budget.take(client, size)
    except ServiceError:
        return False
    return True


def test_one_client_leaves_a_quarter_for_others():
    budget = Budget(1000, "bytes")
    assert sum(taken(budget, "greedy", 10) for _ in range(200)) == 75
    assert taken(budget, "other", 150)
    assert not taken(budget, "greedy", 10)


def test_what_is_spared_is_for_who_holds_little():
    budget = Budget(2048, "connections", least=8, spare=128)
    for client in range(4):  # Else the fourth would leave 8 free.
        while taken(budget, f"greedy {client}", 1):
            pass
    assert 1800 < budget.held <= 2048 - 128


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.booleans()), max_size=60), st.integers(0, 60))
def test_never_more_than_there_is_and_everything_comes_back(steps, spare):
    budget, held = Budget(100, "bytes", spare=spare), []
    for client, size, give in steps:
        if give and held:
            budget.give(*held.pop())
        elif taken(budget, client, size):
            held.append((client, size))
        assert budget.held == sum(size for _, size in held) <= 100
    for each in held:
        budget.give(*each)
    assert budget.held == 0
    assert taken(budget, "anybody", budget.most_for_one)


async def test_who_waits_gets_what_is_given_back_in_order():
    budget = Budget(4, "messages")
    with budget.lease("a") as first:
        first.take(3)
        leases = [budget.lease("a"), budget.lease("a"), budget.lease("b")]
        waiting = [asyncio.ensure_future(lease.wait(1)) for lease in leases]
        await asyncio.sleep(0)
        assert [each.done() for each in waiting] == [False, False, False]
        first.give(1)
        await asyncio.sleep(0)
        # One of a's, and b before the other of a, which has its lease.
        assert [each.done() for each in waiting] == [True, False, True]
        waiting[1].cancel()
        await asyncio.gather(*waiting[:2], return_exceptions=True)
    await waiting[2]
    for lease in leases:
        lease.__exit__(None, None, None)
    assert budget.held == 0


async def test_who_waits_for_much_is_not_overtaken_by_those_who_came_later_for_little():
    budget = Budget(8, "messages", least=8)
    for client in ("a", "b"):
        budget.take(client, 3)
    much = asyncio.ensure_future(budget.wait("c", 6))
    await asyncio.sleep(0)
    little = [asyncio.ensure_future(budget.wait("d", 1)) for _ in range(6)]
    await asyncio.sleep(0)
    budget.give("a", 3)
    await asyncio.sleep(0)
    assert [much.done(), *[each.done() for each in little]] == [False] * 7
    budget.give("b", 3)
    await asyncio.sleep(0)
    assert [much.done(), *[each.done() for each in little]] == [True] * 3 + [False] * 4
    budget.give("c", 6)
    await asyncio.gather(much, *little)
    assert budget.held == 6


async def test_room_that_came_too_late_is_given_back():
    budget = Budget(4, "messages")
    with budget.lease("a") as first:
        first.take(3)
        waiting = asyncio.ensure_future(budget.wait("a", 3))
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.held == 0


def test_what_is_promised_fits_beside_what_others_are_promised_and_is_no_less_there_for_who_takes_it():
    budget = Budget(64, "bytes")
    assert [budget.promise("proxy", 15) for _ in range(5)] == [True, True, True, False, False]
    for _ in range(3):
        budget.take("proxy", 15)  # Each comes as it was promised.
    assert budget.promise("another", 4)
    budget.give("proxy", 45)
    assert not budget.promise("proxy", 15), "they are promised until they say that they are done"
    for _ in range(3):
        budget.fulfil("proxy", 15)
    assert budget.promise("proxy", 15)


def test_promises_leave_nothing_behind():
    budget = Budget(64, "bytes")
    for size in (0, 5, 0):
        assert budget.promise("a", size)
    assert not budget.promise("a", 60)
    for size in (0, 5, 0):
        budget.fulfil("a", size)
    assert (budget._promised, budget._all_promised) == ({}, 0)


async def test_many_bodies_one_after_the_other_end_in_one_release_of_memory_to_the_system():
    budget, released, times = Budget(1000 << 20, "bytes"), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def release():
        times.append(1)
        loop.call_soon_threadsafe(released.set)

    async def requests(count):
        for _ in range(count):
            with budget.lease("a") as lease:
                lease.take(1 << 20)
        await turns()

    heap = Trim(budget, release, quiet_s=0)
    await requests(15)
    assert not times
    await requests(1)
    await released.wait()
    await requests(15)
    assert times == [1], "what was released is not counted again"
    await heap.close()


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
