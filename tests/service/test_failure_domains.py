"""Processes from which others are forked are nobody's life: kill one, stop one, or let it fork nothing, under load.

What is forked is the server's own child. The fixture `serve` asserts after each test that the service answered all the
while.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.support.images import GREY
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import PREDICT, assert_nothing_left, is_ready, metric

FOUR = ("devices=4,delay_ms=5,fail=*1000000", "--decoders", "2")
"""Devices. With a fault that does not come the null device looks at images, so there are decoders."""
FORK_SERVERS = ("fork-workers", "fork-decoders")


def zombies(service):
    return [child for child in service.children() if child.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_fork_servers_end_alone_and_others_take_their_place(serve, number):
    with serve(*FOUR) as service:
        workers, decoders = service.named("anychip-worker"), service.named("anychip-decoder")
        assert (len(workers), len(decoders)) == (4, 2)
        async with Load(service.url, PREDICT, GREY, 8) as load:
            first = {pid for name in FORK_SERVERS for pid in service.named(name)}
            for pid in first:
                os.kill(pid, number)

            def replaced():
                assert is_ready(service)
                assert set(service.named("anychip-worker")) == set(workers)
                assert metric(service, "anychip_decoder_restarts_total") == 0
                now = {pid for name in FORK_SERVERS for pid in service.named(name)}
                return len(now) == 2 and not now & first and not zombies(service)

            await until(replaced)
            await load.answers(50)
            # Decoders of a fork server that is gone are replaced one by one: none of them has died.
            await until(lambda: len(set(service.named("anychip-decoder")).difference(decoders)) == 2)
            assert metric(service, "anychip_decoder_restarts_total") == 0
            # The new ones fork as the old ones did.
            decoders = service.named("anychip-decoder")
            next(iter(workers.values())).kill()
            next(iter(decoders.values())).kill()
            await until(lambda: set(service.named("anychip-worker")).difference(workers))
            await until(lambda: set(service.named("anychip-decoder")).difference(decoders))
            await load.answers(50)
        assert set(load.outcomes) == {(200, "OK")}
        # Those that were killed here, and no other.
        assert metric(service, "anychip_worker_restarts_total") == 1
        assert metric(service, "anychip_decoder_restarts_total") == 1
        await until(lambda: not zombies(service))
        children = service.children()
        assert {child.ppid() for child in children} == {service.process.pid}
        assert_nothing_left(service)


async def test_nothing_is_left_of_a_killed_server_whose_fork_servers_were_replaced(serve):
    with serve(*FOUR, ends=True) as service:
        first = {pid for name in FORK_SERVERS for pid in service.named(name)}
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len({pid for name in FORK_SERVERS for pid in service.named(name)} - first) == 2)
        worker = service.workers()[0]
        worker.kill()
        await until(lambda: len(set(service.named("anychip-worker")) - {worker.pid}) == 4 and is_ready(service))
        await until(lambda: not first & {child.pid for child in service.children()})
        children = service.children()
        service.process.kill()
        service.process.wait(WAIT_S)
        assert not psutil.wait_procs(children, timeout=WAIT_S)[1]
