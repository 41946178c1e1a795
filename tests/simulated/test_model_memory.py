"""What models take of a simulated device: measured, shown and kept; and more of them than its memory holds."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support import small_classifier
from tests.support.images import encoded
from tests.support.null_service import metric
from tests.support.service_process import cache_in, running

MB = 1 << 20
ON_NPU = ("--device", "npu", "--timeout-ms", "60000")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return entries of `--models` for twenty small classifiers, each with weights of its own."""
    folder = tmp_path_factory.mktemp("models")
    return [small_classifier.written(folder, f"m{seed}", seed) for seed in range(20)]


def test_what_a_model_takes_is_measured_and_shown(tmp_path, models):
    cache = ("--cache-dir", cache_in(tmp_path))
    options = (*ON_NPU, "--simulate", "npu:1,memory_mb=1024,model_mb=200", *cache)
    with running(tmp_path, "--models", ",".join(models[:2]), *options) as service, service.client() as client:
        for each in client.get("/v1/models").json()["models"]:
            [on] = each["served_on"]
            assert 200 * MB <= on["memory_bytes"] < 230 * MB
            assert metric(service, "anychip_model_memory_bytes", model=each["name"]) == on["memory_bytes"]
        assert client.get("/v1/stats").json()["models"][0]["memory_bytes"] > 200 * MB


MODEL = 211 * MB
"""What each takes, with its batches."""


def on_demand(fit):
    """Options with which so many models fit, m0 among them, which stays."""
    return ("--models-on-demand", "all,-m0", "--device-memory", str(fit * MODEL), "--decoders", "2")


def jpeg(seed):
    """Make a small photograph of noise that differs by seed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    return encoded(Image.fromarray(pixels).resize((64, 64)), "JPEG", quality=95)


def scores(answer):
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
            loads = metric(service, "anychip_model_loads_total", outcome="loaded")  # Those at the start are among them.
            assert loads >= 6 + 3 + 1  # At the start, there, and at least once on the way back.
            assert metric(service, "anychip_model_memory_budget_bytes", device="npu:0") == 3 * MODEL
        log = service.log.read_text()
        assert "m3 is loaded, to know what it takes" in log


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
