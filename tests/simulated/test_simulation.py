"""Simulated accelerators from outside: when they exist, what they are called, and how the service serves on them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anychip_tools.simulated import _stand_ins
from anychip_tools.simulated.behaviour import Simulation, device_types, parse, row_of
from anychip_tools.simulated.library import build
from anychip_tools.simulated.recorded import RECORDED
from backends import BackendUnavailableError, simulated
from tests.support.load import WAIT_S, Load, until
from tests.support.photographs import FILES
from tests.support.service_process import running
from tests.support.small_classifier import PREDICT, written

DEVICE_TYPES = device_types()
ROOT = Path(__file__).parents[2]
PHOTO = FILES[0].read_bytes()
ONE = ("--batch-sizes", "1", "--models")


@given(
    st.sampled_from(DEVICE_TYPES),
    st.integers(1, 8),
    st.dictionaries(
        st.sampled_from(["memory_mb", "cache_mb", "leak_mb", "copy_delay_ms", "oom", "lose", "others_mb"]),
        st.integers(1),
    ),
    st.fixed_dictionaries(
        {}, optional={"graphs": st.integers(0, 1), "sick": st.integers(0, 7), "decode": st.integers(0, 1)}
    ),
    st.sampled_from(["", *RECORDED]),
    st.lists(st.sampled_from(["aten::silu", "torchvision::nms"])),
)
def test_what_is_written_is_read(device_type, devices, numbers, more, fault, lacks):
    numbers = {name: min(number, 2**20) for name, number in numbers.items()} | more
    parts = [f"{device_type}:{devices}", *(f"{name}={number}" for name, number in numbers.items())]
    parts += [f"lacks={operator}" for operator in lacks] + ([f"fault={fault}"] if fault else [])
    assert parse(" , ".join(parts)) == Simulation(device_type, devices, lacks=tuple(lacks), fault=fault, **numbers)


@pytest.mark.parametrize(
    "text",
    [
        "cuda",
        "npu:0",
        "npu:9",
        "npu:two",
        "npu:1,memory_mb",
        "npu,memory_mb=0",
        "npu,lacks=silu",
        "npu,warp=1",
        "npu,graphs=2",
        "npu,sick=8",
        "npu,decode=2",
        "npu,decode_off=256",
        "npu,fault=all",
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(text):
    with pytest.raises(BackendUnavailableError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"The simulation {text!r} cannot be read: ")
    assert str(caught.value).endswith(".")


def test_a_stand_in_does_nothing_without_the_variable(tmp_path):
    device_type = DEVICE_TYPES[0]
    package = f"torch_{device_type}"
    path = _stand_ins(tmp_path, row_of(device_type))
    child = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        env={**os.environ, "PYTHONPATH": f"{path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 1
    assert "it does nothing unless ANYCHIP_SIMULATE asks" in child.stderr.splitlines()[-1]


def test_nothing_is_simulated_by_itself():
    assert not any(simulated.simulates(device_type) for device_type in DEVICE_TYPES)
    assert not any("simulated/stand-ins" in path for path in sys.path)


def test_without_a_compiler_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(BackendUnavailableError, match=r"no C\+\+ compiler 'no-such-compiler': install g\+\+"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", f"{sys.executable} -c raise.SystemExit(3)")
    with pytest.raises(BackendUnavailableError, match="cannot be compiled for torch"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_service_on_simulated_devices_says_so_everywhere(tmp_path):
    with (
        running(tmp_path, *ONE, written(tmp_path), "--simulate", "npu:2", "--device", "npu") as service,
        service.client() as client,
    ):
        answer = client.post(PREDICT, content=PHOTO, headers={"Content-Type": "image/jpeg"}).json()
        assert answer["simulated"] is True
        assert answer["device"] in ("npu:0", "npu:1")
        assert (answer["engine"], answer["precision"]) == ("eager", "fp32")
        devices = client.get("/v1/devices").json()["devices"]
        assert [one["device"] for one in devices] == ["npu:0", "npu:1"]
        assert all(one["simulated"] and one["vendor"] == "simulated-ascend" for one in devices)
        assert all("Simulated" in one["name"] for one in devices)
        assert (
            'anychip_device_memory_bytes{device="npu:1",kind="total",vendor="simulated-ascend"}'
            in client.get("/metrics").text
        )
    assert "npu is simulated: the CPU computes its answers" in service.log.read_text()


async def test_a_lost_device_is_handed_over_and_nobody_notices(tmp_path):
    words = (*ONE, written(tmp_path), "--simulate", "mlu:1,lose=40", "--device", "mlu")
    with running(tmp_path, *words, fresh=True) as service:  # With the children and workers that people have.
        worker = service.worker()
        first = worker.pid
        # The server starts no process itself: it would stand still until the new program runs.
        assert any("main.fresh(" in word for word in worker.cmdline())
        async with Load(service.url, PREDICT, PHOTO, 4) as load:
            await load.answers(100)
        assert set(load.outcomes) == {(200, "OK")}
        await until(lambda: len(service.workers()) == 1 and service.worker().pid != first)
        # Each worker loses it anew after forty batches, those of its gate included.
        text = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        [lost] = re.findall(r'anychip_worker_restarts_total\{device="mlu:0",reason="lost"\} (\S+)', text)
        assert float(lost) >= 1
    assert "is lost" in service.log.read_text()


async def test_a_batch_without_memory_is_computed_all_the_same(tmp_path):
    # The gate has had eight.
    with running(tmp_path, *ONE, written(tmp_path), "--simulate", "npu:1,oom=14", "--device", "npu") as service:
        first = service.worker().pid
        async with Load(service.url, PREDICT, PHOTO, 2) as load:
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
        assert service.worker().pid == first
    assert "is tried again by itself: npu:0 has too little memory: NPU out of memory" in service.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_device_is_compiled_leaves_no_compiler_and_no_file(tmp_path, number):
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\nfor own; do :; done\ntouch "$own"\nsleep 600 &\necho $! > {tmp_path}/child\nwait\n'
    )
    compiler.chmod(0o755)
    cache = str(tmp_path / "cache")
    words = (  # What was started in the background may have inherited that it ignores SIGINT.
        "import pathlib, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from anychip_tools.simulated.library import build; build(pathlib.Path({cache!r}))"
    )
    environment = {**os.environ, "CXX": str(compiler), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", words], env=environment, stderr=subprocess.DEVNULL) as process:
        for _ in range(WAIT_S * 100):
            if (tmp_path / "child").exists() and (tmp_path / "child").read_text():
                break
            time.sleep(0.01)
        child = psutil.Process(int((tmp_path / "child").read_text()))
        process.send_signal(number)
        assert process.wait(WAIT_S) == (128 + number if number == signal.SIGTERM else -number)
    assert not psutil.wait_procs([child], timeout=WAIT_S)[1]
    assert not list((tmp_path / "cache").iterdir())
