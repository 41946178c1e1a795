"""torch_openreg, PyTorch's own example of a device outside torch, as an external vendor: a witness we did not write."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from torch import Tensor, nn

from tests.support import small_classifier
from tests.support.device_child import child, contract
from tests.support.images import JPEG, encoded
from tests.support.load import WAIT_S, Load, client_at, until
from tests.support.null_service import assert_nothing_left, is_ready, metric
from tests.support.service_process import ServiceProcess, running
from tests.support.stub_drivers import openreg

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # The first one builds the package.

ROOT = Path(__file__).parents[2]
DEVICE = "openreg:1"
"""The second one: what forgets the number of a device is on the first."""
BALLAST = 8 << 20
CLIENTS, EACH = 8, 25
NOISE = np.random.default_rng(0).integers(0, 256, (CLIENTS, 32, 32, 3), dtype=np.uint8)
FILES = [encoded(Image.fromarray(pixels)) for pixels in NOISE]


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the vendor's package; return the variables of a process that finds it."""
    source, target = tmp_path_factory.mktemp("vendor") / "source", tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "tests/support/openreg", source)
    command = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", *command, str(source)], check=True, timeout=120)
    return {"PYTHONPATH": os.pathsep.join(map(str, (openreg(), target, ROOT, ROOT / "plugins/tools")))}


def test_its_devices_pass_the_contract_suite(beside: dict[str, str]) -> None:
    ran = contract("tests.support.devices.plain", "openreg", sys.executable, beside, "-k", "not resnet50")
    assert "test_sample_weights_answer_on_photographs_as_on_the_cpu" in ran


MEMORY = f"""
import resource
from anychip_tools.verify.contract import SmallNetwork, on_cpu, small_images
from backends import BACKENDS, BackendError, EngineRefusedError, OutOfDeviceMemoryError

def refusal(network):
    try:
        return backend.load(network, "{DEVICE}", "eager", "fp32", (2,))[0].run(small_images())
    except BackendError as error:
        return type(error), str(error)

class Full(SmallNetwork):
    def forward(self, pixels):
        resource.setrlimit(resource.RLIMIT_AS, (1, -1))  # No further page: its memory is the host's.
        raise RuntimeError("an error that nobody knows")

backend = next(each for each in BACKENDS if each.name == "openreg")
executable, report = backend.load(SmallNetwork({BALLAST}), "{DEVICE}", "eager", "fp32", (2,))
assert report.operators == {{"aten::convolution_overrideable": "cpu"}}, report
right, held = on_cpu(SmallNetwork(), small_images()), set()
for _ in range(100):
    answers = executable.run(small_images())
    assert all((ours == theirs).all() for ours, theirs in zip(answers, right, strict=True))
    held.add(backend.memory("{DEVICE}").allocated)
assert len(held) == 1, held
kind, said = refusal(SmallNetwork(1 << 46))
assert kind is OutOfDeviceMemoryError, said
kind, said = refusal(Full())
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert kind is EngineRefusedError, said  # Not lost, though its allocator raises no torch.OutOfMemoryError.
assert (executable.run(small_images())[1] == right[1]).all()
executable.close()
del executable, answers
assert backend.release_cache("{DEVICE}") == 0
assert backend.memory("{DEVICE}").allocated == 0, backend.memory("{DEVICE}")
print("sound")
"""


def test_a_hundred_batches_leave_nothing_behind_and_a_full_device_is_not_lost(beside: dict[str, str]) -> None:
    done = child(sys.executable, beside, "-c", MEMORY)
    assert done.stdout.split()[-1:] == ["sound"], done.stdout + done.stderr[-3000:]


class Attention(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        parts = features.flatten(2).transpose(1, 2).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(parts, parts, parts).mean((1, 2))


def test_a_network_that_it_computes_wrong_is_not_served(beside: dict[str, str], tmp_path: Path) -> None:
    """Its attention is but a name: it leaves the memory of the answer as it was."""
    network = nn.Sequential(nn.Conv2d(3, 8, 8, 8), Attention(), nn.Linear(8, 3))
    options = ("--models", small_classifier.saved(tmp_path, "attends", network), "--device", DEVICE)
    wrong = "its answers to batches of 1 are not the network's"
    with pytest.raises(AssertionError, match=wrong), running(tmp_path, *options, environment=beside):
        pass


SITE = f"""
import torch
from backends import register_release_hook
taken = []
def release(device):
    assert device == "{DEVICE}"
    if taken:
        return taken.pop().nbytes
    taken.append(torch.empty({BALLAST}, dtype=torch.uint8, device=device))
    return 0
register_release_hook("openreg", release)
"""


@pytest.fixture(scope="module")
def service(beside: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("openreg")
    (folder / "our_site.py").write_text(SITE)
    options = ("--device", DEVICE, "--plugins", "our_site", "--guard-policy", "off")
    with running(folder, "--models", small_classifier.written(folder), *options, environment=beside) as service:
        yield service


async def answers(service: ServiceProcess, each: int) -> list[list[dict[str, float]]]:
    """Ask with a connection for each file; return the scores of each answer, by file."""

    async def ask(file: bytes) -> list[dict[str, float]]:
        async with client_at(service.url) as client:
            found = []
            for _ in range(each):
                answer = await client.post(small_classifier.PREDICT, content=file, headers=JPEG)
                assert answer.status_code == 200, answer.text
                [prediction] = answer.json()["predictions"]
                found.append({one["label"]: one["score"] for one in prediction["classes"]})
            return found

    return await asyncio.gather(*map(ask, FILES))


async def test_every_answer_under_load_is_the_cpus(service: ServiceProcess, tmp_path: Path) -> None:
    options = ("--models", small_classifier.written(tmp_path), "--device", "cpu")
    with running(tmp_path, *options) as on_cpu:
        right = await answers(on_cpu, 1)
    ours = await answers(service, EACH)
    for mine, [theirs] in zip(ours, right, strict=True):
        assert len(mine) == EACH
        assert all(one == pytest.approx(theirs, abs=1e-6) for one in mine)
    assert len({max(theirs.values()) for [theirs] in right}) == CLIENTS, "the images differ"
    [device] = httpx.get(f"{service.url}/v1/devices", timeout=WAIT_S).json()["devices"]
    assert (device["device"], device["name"], device["simulated"]) == (DEVICE, "OpenReg", False)


async def test_a_killed_worker_and_a_hand_over_cost_nobody_an_answer(service: ServiceProcess) -> None:
    def load_again() -> None:
        loaded = httpx.post(f"{service.admin_url}/v2/repository/models/small/load", timeout=WAIT_S)
        assert loaded.status_code == 200, loaded.text

    kill = ("anychip_worker_restarts_total", "died", lambda: service.worker().kill())
    for name, reason, act in (kill, ("anychip_handovers_total", "load", load_again)):
        pid = service.worker().pid
        async with Load(service.url, small_classifier.PREDICT, FILES[0], CLIENTS) as load:
            await load.answers(50)
            await asyncio.to_thread(act)
            await load.answers(50)
        assert set(load.outcomes) == {(200, "OK")}
        await until(lambda: is_ready(service))
        assert service.worker().pid != pid
        assert metric(service, name, reason=reason) == 1
        assert_nothing_left(service)


async def test_memory_is_flat_and_a_release_returns_what_its_hook_held(service: ServiceProcess) -> None:
    def allocated() -> float:
        return float(metric(service, "anychip_device_memory_bytes", device=DEVICE, kind="allocated"))

    async def holds(more: int) -> None:
        await until(lambda: allocated() == before + more)

    await answers(service, EACH)  # A worker that has just begun says what its start took.
    before = allocated()
    for taken, returned in itertools.pairwise((0, BALLAST, 0)):
        await answers(service, EACH)
        await holds(taken)
        released = httpx.post(f"{service.admin_url}/v1/devices/{DEVICE}:release", timeout=WAIT_S)
        [worker] = released.json()["workers"]
        assert worker["returned_bytes"]["2"] == taken, worker
        await holds(returned)


LEAKING = f"""
import threading, time, torch
kept = []
def leak():
    while True:
        time.sleep(0.05)
        if hasattr(torch, "openreg") and torch.openreg.is_initialized():
            kept.append(torch.ones({BALLAST}, dtype=torch.uint8, device="{DEVICE}"))
threading.Thread(target=leak, daemon=True).start()
"""


async def test_a_leak_that_no_release_returns_ends_in_a_hand_over(beside: dict[str, str], tmp_path: Path) -> None:
    """It does not say how much memory is used: the worker's own memory, which holds the device's, shows the leak."""
    (tmp_path / "our_leak.py").write_text(LEAKING)
    options = ("--models", small_classifier.written(tmp_path), "--device", DEVICE, "--plugins", "our_leak")
    with running(tmp_path, *options, environment=beside) as service:
        first = service.worker().pid
        async with Load(service.url, small_classifier.PREDICT, FILES[0], CLIENTS) as load:
            await until(lambda: metric(service, "anychip_handovers_total") >= 1)
            await load.answers(50)
        assert set(load.outcomes) == {(200, "OK")}
        assert service.worker().pid != first
        assert metric(service, "anychip_cache_releases_total", trigger="resident") >= 1
