"""What models take of a simulated device: measured, shown and kept; and more of them than its memory holds."""

from __future__ import annotations

import asyncio
import bisect
import collections
import io
import itertools
import json
import random
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support import small_classifier
from tests.support.null_service import metric
from tests.support.service_process import cache_in, running

MB = 1 << 20
ON_NPU = ("--device", "npu", "--timeout-ms", "60000")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return entries of `--models` for twenty small classifiers, each with weights of its own."""
    folder = tmp_path_factory.mktemp("models")
    return [small_classifier.written(folder, f"m{seed}", seed) for seed in range(20)]


def command(*words):
    words = (sys.executable, "-m", "app", *words)
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)


def test_what_a_model_takes_is_measured_shown_and_kept_for_the_next_start(tmp_path, models):
    cache = ("--cache-dir", cache_in(tmp_path))
    options = (*ON_NPU, "--simulate", "npu:1,memory_mb=1024,model_mb=200", *cache)
    with running(tmp_path, "--models", ",".join(models[:2]), *options) as service, service.client() as client:
        for each in client.get("/v1/models").json()["models"]:
            [on] = each["served_on"]
            assert 200 * MB <= on["memory_bytes"] < 230 * MB
            assert metric(service, "anychip_model_memory_bytes", model=each["name"]) == on["memory_bytes"]
        assert client.get("/v1/stats").json()["models"][0]["memory_bytes"] > 200 * MB
    rows = json.loads(command("devices", "--models", "--json", *cache).stdout)
    assert {(row["model"], row["engine"], row["batch_sizes"]) for row in rows} == {
        (name, "eager", "1,4") for name in ("m0", "m1")
    }
    assert "m1" in command("devices", "--models", *cache).stdout
    with running(tmp_path, "--models", ",".join(models[:2]), *options) as service:
        assert "memory of npu:0 as measured before: m0 2" in service.log.read_text()


def test_models_that_do_not_fit_are_said_before_they_fail(tmp_path, models):
    cache = ("--cache-dir", cache_in(tmp_path))
    given = ("--engine", "eager", "--precision", "fp32", "--batch-sizes", "1,4", *cache)
    simulated = "npu:1,memory_mb=700,model_mb=200"
    for each in models[:2], models[2:4]:
        with running(tmp_path, "--models", ",".join(each), *ON_NPU, "--simulate", simulated, *cache):
            pass
    words = ("--models", ",".join(models[:4]), "--device", "npu", "--simulate", simulated, *given)
    started = command("serve", *words, "--port", "0")
    assert started.returncode == 1
    assert "as measured before: m0 2" in started.stderr
    assert "little memory" in started.stderr


MODEL = 211 * MB
"""What each takes, with its batches."""


def on_demand(fit):
    """Options with which so many models fit, m0 among them, which stays."""
    return ("--models-on-demand", "all,-m0", "--device-memory", str(fit * MODEL), "--decoders", "2")


def jpeg(seed):
    """Make a small photograph of noise that differs by seed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((64, 64)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def scores(answer):
    """Return the scores of an answer by class."""
    return {each["label"]: each["score"] for each in answer["predictions"][0]["classes"]}


def resident_bytes(client):
    """Return the memory that loaded models take, as the service reports it."""
    return sum(on["memory_bytes"] for each in client.get("/v1/models").json()["models"] for on in each["served_on"])


def test_models_are_loaded_when_they_are_asked_for_and_others_go(tmp_path, models):
    simulated = ("--simulate", "npu:1,memory_mb=2048,model_mb=200", *on_demand(3))
    cache = ("--cache-dir", cache_in(tmp_path))
    image = jpeg(0)
    with running(tmp_path, "--models", ",".join(models[:4]), *ON_NPU, *simulated, *cache) as service:
        with service.client() as client:
            assert client.get("/v2/health/ready").status_code == 200
            assert resident_bytes(client) < 230 * MB  # m0 alone.
            found = {}
            for number in range(4):
                answer = client.post(f"/v1/models/m{number}:predict", content=image)
                assert answer.status_code == 200, answer.text
                found[number] = scores(answer.json())
                assert resident_bytes(client) <= 3 * MODEL
            assert len({tuple(each.values()) for each in found.values()}) == 4  # Each is another network.
            for number in range(3, -1, -1):
                answer = client.post(f"/v1/models/m{number}:predict", content=image)
                assert scores(answer.json()) == found[number]
            assert loads(service) >= 6 + 3 + 1  # At the start, there, and at least once on the way back.
            assert metric(service, "anychip_model_memory_budget_bytes", device="npu:0") == 3 * MODEL
        log = service.log.read_text()
        assert "m3 is loaded, to know what it takes" in log


class Crowd:
    """Clients that ask for models, each its own way, and check every answer; `outcomes` by code, `answered`: model,
    beginning and end of each answer, `looked`: when it was looked, and the load time of each model that was there.
    """

    def __init__(self, url, image):
        self._client = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        self._image = image
        self.known: dict[str, tuple[float, ...]] = {}  # What each model answered first.
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.answered: list[tuple[str, float, float]] = []
        self.looked: list[tuple[float, dict[str, float]]] = []
        self.most_bytes = 0
        self.stopping = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self._client.aclose()

    async def ask(self, name, **headers):
        began_s = time.monotonic()
        answer = await self._client.post(f"/v1/models/{name}:predict", content=self._image, headers=headers)
        self.answered += [(name, began_s, time.monotonic())] if answer.status_code == 200 else []
        code = "OK" if answer.status_code == 200 else answer.json()["code"]
        self.outcomes[code] += 1
        if code == "OK":
            found = tuple(scores(answer.json()).values())
            if found != self.known.setdefault(name, found) or answer.json()["weights"] != f"{name}.torchscript":
                self.wrong.append(name)
        if code == "MODEL_LOADING":
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) >= 1

    async def zipf(self, seed, count):
        """One model is asked for as often as its place in the order of popularity says."""
        dice, names = random.Random(seed), [f"m{number}" for number in range(1, count)]
        weights = [1 / place for place in range(1, count)]
        while not self.stopping:
            await self.ask(dice.choices(names, weights)[0], **{"X-Timeout-Ms": "10000"})
            await asyncio.sleep(0.02)

    async def adversary(self, count):
        """All in turn: no order of residence helps."""
        number = 0
        while not self.stopping:
            number = number % (count - 1) + 1
            await self.ask(f"m{number}", **{"X-Timeout-Ms": "500"})

    async def pinned(self):
        while not self.stopping:
            await self.ask("m0")
            await asyncio.sleep(0.02)

    async def wakes(self):
        """As often as `zipf` asks, for nothing that a device computes: what a processor that sleeps costs is not
        another model's doing.
        """
        while not self.stopping:
            await self._client.get("/v2/health/live")
            await asyncio.sleep(0.02)

    async def looks(self):
        while not self.stopping:
            listed = (await self._client.get("/v1/models")).json()["models"]
            there = {each["name"]: each["served_on"][0] for each in listed if each["served_on"]}
            self.looked.append((time.monotonic(), {name: on["load_s"] for name, on in there.items()}))
            self.most_bytes = max(self.most_bytes, sum(on["memory_bytes"] for on in there.values()))
            await asyncio.sleep(0.1)

    def pinned_p99_s(self):
        """In the last run."""
        return p99_s([ended_s - began_s for name, began_s, ended_s in self.answered if name == "m0"])

    def others_s(self):
        """In the last run: what answers took of models that were there before and after: of those that were under way
        while no model was loaded, and of the others.
        """
        looked = self.looked
        loads = [
            (before_s - load_s, now_s)
            for (before_s, before), (now_s, now) in itertools.pairwise(looked)
            for name, load_s in now.items()
            if name not in before
        ]
        times = [when_s for when_s, _ in looked]
        between, during = [], []
        for name, began_s, ended_s in self.answered:
            first, last = bisect.bisect(times, began_s) - 1, bisect.bisect(times, ended_s)
            if name == "m0" or not 0 <= first < last < len(times):
                continue
            if all(name in there for _, there in looked[first : last + 1]):
                loading = any(begin_s < ended_s and began_s < end_s for begin_s, end_s in loads)
                (during if loading else between).append(ended_s - began_s)
        return between, during

    async def run(self, seconds, *clients):
        self.stopping = False
        self.answered.clear()
        self.looked.clear()
        tasks = [asyncio.create_task(client) for client in (*clients, self.looks())]
        await asyncio.sleep(seconds)
        self.stopping = True
        await asyncio.gather(*tasks)


def p99_s(taken_s):
    """Of answer times; NaN where there are none, as on a slow machine, which loads all the time."""
    return float(np.quantile(taken_s, 0.99)) if taken_s else float("nan")


def loads(service):
    """Of all models, since the start; those at the start are among them."""
    return metric(service, "anychip_model_loads_total", outcome="loaded")


LOAD_S = 0.2
"""What a load takes at least: the device's load_ms."""


@pytest.mark.parametrize(
    ("seconds", "count", "fit"),
    [(8, 6, 3), pytest.param(600, 20, 5, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
async def test_more_models_than_fit_lose_nothing_and_cause_no_storm(tmp_path, models, seconds, count, fit):
    simulated = ("--simulate", f"npu:1,memory_mb=2048,model_mb=200,load_ms={LOAD_S * 1e3:.0f}", *on_demand(fit))
    cache = ("--cache-dir", cache_in(tmp_path))
    image = jpeg(0)
    with running(tmp_path, "--models", ",".join(models[:count]), *ON_NPU, *simulated, *cache) as service:
        async with Crowd(service.url, image) as crowd:
            short_s = max(3, seconds / 20)
            await crowd.run(short_s, crowd.pinned())
            idle_s = crowd.pinned_p99_s()
            await crowd.run(short_s, crowd.pinned(), *(crowd.wakes() for _ in range(4)))
            alone_s = crowd.pinned_p99_s()
            # The same clients with models that all fit: what they cost a device and a processor that all share.
            for number in range(1, fit):
                await crowd.ask(f"m{number}")
            before = loads(service)
            await crowd.run(short_s, crowd.pinned(), *(crowd.zipf(seed, fit) for seed in range(4)))
            assert loads(service) == before
            beside_s, (hot_s, _) = crowd.pinned_p99_s(), crowd.others_s()
            before = loads(service)
            await crowd.run(seconds, crowd.pinned(), *(crowd.zipf(seed, count) for seed in range(4)))
            among_others_s, (between_s, during_s) = crowd.pinned_p99_s(), crowd.others_s()
            print(
                crowd.outcomes,
                f"pinned p99 {idle_s * 1e3:.1f} ms alone, {alone_s * 1e3:.1f} ms alone beside requests for no model, "
                f"{beside_s * 1e3:.1f} ms beside models that fit, {among_others_s * 1e3:.1f} ms beside models that "
                f"come and go; others' p99 {p99_s(hot_s) * 1e3:.1f} ms where all fit, {p99_s(between_s) * 1e3:.1f} ms "
                f"of {len(between_s)} between loads, {p99_s(during_s) * 1e3:.1f} ms of {len(during_s)} during loads",
            )
            print(f"{loads(service) - before:.0f} loads in {seconds} s, {crowd.most_bytes / MB:.0f} MB at most")
            # All in turn, so often that no memory could do it: refused, and not loaded each time.
            refused, before = crowd.outcomes["MODEL_LOADING"], loads(service)
            await crowd.run(max(4, seconds / 20), crowd.adversary(count))
            # How many in which time: tests/unit/test_residency.py, by its own clock.
            assert crowd.outcomes["MODEL_LOADING"] - refused > loads(service) - before
            # Refusals that were told, and late answers of a busy machine; nothing else.
            assert set(crowd.outcomes) <= {"OK", "MODEL_LOADING", "DEADLINE_UNREACHABLE", "DEADLINE_EXCEEDED"}
            assert not crowd.wrong
            assert len(set(crowd.known.values())) == len(crowd.known) >= 3  # Each is another network.
            assert crowd.most_bytes <= fit * MODEL
            if seconds > 60:  # A short one measures what else the machine does.
                assert crowd.outcomes["OK"] > 10 * seconds
                assert among_others_s <= 1.3 * idle_s
                # Against the same requests: a model that is asked for rarely is slower than one that always computes.
                assert p99_s(during_s) <= 1.5 * p99_s(between_s)


async def test_a_worker_that_ends_while_it_loads_loses_no_request(tmp_path, models):
    simulated = ("--simulate", "npu:1,memory_mb=2048,model_mb=200,load_ms=1500", *on_demand(3))
    image = jpeg(0)
    with running(tmp_path, "--models", ",".join(models[:3]), *ON_NPU, *simulated) as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            waiting = [
                asyncio.create_task(client.post(f"/v1/models/m{number}:predict", content=image)) for number in (1, 2, 1)
            ]
            await asyncio.sleep(0.5)
            service.worker().kill()
            assert [(await each).status_code for each in waiting] == [200, 200, 200]
