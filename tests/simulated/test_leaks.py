"""Leaks against the real service on null and simulated devices: nobody fails, memory stays within bounds."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import psutil
import pytest

from tests.support import small_classifier
from tests.support.constants import GUARD_COOLDOWN_S, HANDOVER_INTERVAL_S
from tests.support.images import GREY
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import PREDICT, metric, post, serving
from tests.support.service_process import running

MIB = 1 << 20


def memory(service, kind):
    return metric(service, "anychip_device_memory_bytes", kind=kind)


# A worker lasts 32 batches, far less time than the next one takes to start, and often less than the guard needs to see
# a slope: in the long pause it cannot see one at all.
@pytest.mark.parametrize("pause_s", [0, 600])
async def test_a_leak_too_fast_for_its_replacement_makes_images_wait_and_fails_none(tmp_path, pause_s):
    options = ("--batch-sizes", "1", "--guard-policy", "0.3")
    constants = {GUARD_COOLDOWN_S: pause_s, HANDOVER_INTERVAL_S: 0}
    with serving(tmp_path, "leak_mb=32,memory_mb=1024", *options, constants=constants) as service:
        async with Load(service.url, PREDICT, GREY, 4) as load:
            await load.answers(70)
        assert set(load.outcomes) == {(200, "OK")}


async def leaking(folder, device, leak, rung, *, batches, leak_mb, memory_mb):
    """So many batches, which together leak more than the device has: what empty_cache returns (rung 2), or what only
    the end of a process does (rung 3). A process whose successor is not there in time ends with the device full."""
    delay_ms = 10 if rung == "2" else 40
    options = (
        *("--models", small_classifier.written(folder), "--batch-sizes", "1", "--device", device),
        # A batch of the smallest network takes no time: it would fill the device before the guard looks, or before the
        # next worker is there.
        *("--simulate", f"{device}:1,memory_mb={memory_mb},{leak}={leak_mb},copy_delay_ms={delay_ms}"),
        *("--guard-policy", "0.4"),
    )
    with running(folder, *options, constants={GUARD_COOLDOWN_S: 0, HANDOVER_INTERVAL_S: 0}) as service:
        first = service.worker().pid
        used, resident = [], []
        async with Load(service.url, small_classifier.PREDICT, GREY, 4) as load:
            for _ in range(20):
                await load.answers(batches // 20)
                used.append(await asyncio.to_thread(memory, service, "used"))
                workers = await asyncio.to_thread(service.workers)
                resident.append(sum(rss(worker) for worker in workers))
        assert set(load.outcomes) == {(200, "OK")}
        assert metric(service, "anychip_batch_size_count") >= batches
        assert 0 < max(used) <= memory_mb * MIB
        # Of two workers, while one takes over from the other; PyTorch takes about 700 MB in each.
        assert max(resident) < 2 * (memory_mb + 768) * MIB
        least = batches * leak_mb / memory_mb
        if rung == "2":
            assert metric(service, "anychip_cache_releases_total", rung=rung) >= least
            assert service.worker().pid == first
            assert metric(service, "anychip_retried_total") == 0
        else:
            # A hand-over is counted once the worker before has drained.
            await until(lambda: sum(metric(service, name) for name in REPLACED) >= least)


REPLACED = ("anychip_handovers_total", "anychip_worker_restarts_total")
LEAKS = [("cache_mb", "2", 500), ("leak_mb", "3", 200)]  # A process that ends takes seconds to be replaced.


# Each leak on one of them: simulated devices differ in names, and the soak has each leak on both.
@pytest.mark.parametrize(("device", "leak", "rung", "batches"), [("mlu", *LEAKS[0]), ("npu", *LEAKS[1])])
async def test_batches_that_leak_more_than_the_device_has(tmp_path, device, leak, rung, batches):
    await leaking(tmp_path, device, leak, rung, batches=batches, leak_mb=1, memory_mb=100)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["npu", "mlu"])
@pytest.mark.parametrize(("leak", "rung", "_"), LEAKS)
async def test_five_thousand_batches_that_leak_eight_megabytes_each(tmp_path, device, leak, rung, _):
    await leaking(tmp_path, device, leak, rung, batches=5000, leak_mb=8, memory_mb=1024)


def rss(worker):
    with contextlib.suppress(psutil.NoSuchProcess):
        return worker.memory_info().rss
    return 0


async def test_memory_of_a_device_is_released_when_asked_for(tmp_path):
    (tmp_path / "our_site.py").write_text(
        "from backends import register_release_hook\n"
        "register_release_hook('null', lambda device: 12345)\n"
        "register_release_hook('null', lambda device: 1 / 0)\n"
    )
    null = "devices=2,cache_mb=3,memory_mb=1024"
    options = ("--batch-sizes", "1", "--guard-policy", "off", "--plugins", "our_site")
    with serving(tmp_path, null, *options) as service:
        for _ in range(4):
            assert post(service) == (200, "OK")
        returned = 0
        for device in ("null:0", "null:1"):
            answer = httpx.post(f"{service.admin_url}/v1/devices/{device}:release", timeout=WAIT_S)
            assert (answer.status_code, answer.json()["device"]) == (200, device)
            [worker] = answer.json()["workers"]
            assert worker["worker"].partition("#")[0] == device
            assert worker["returned_host_bytes"].keys() == worker["returned_bytes"].keys()
            returned += worker["returned_bytes"]["2"]
        assert returned == 12 * MIB + 2 * 12345
        assert httpx.post(f"{service.admin_url}/v1/devices/null:7:release", timeout=WAIT_S).status_code == 404
        assert metric(service, "anychip_cache_releases_total", rung="2", trigger="request") == 2
        assert post(service) == (200, "OK")
