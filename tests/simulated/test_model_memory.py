"""What models take of a simulated device: measured, shown and kept; and more of them than its memory holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import small_classifier
from tests.support.null_service import metric
from tests.support.service_process import running

pytestmark = pytest.mark.slow

MB = 1 << 20
ON_NPU = ("--device", "npu", "--timeout-ms", "60000")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """What `--models` takes for twenty small classifiers, each with weights of its own."""
    folder = tmp_path_factory.mktemp("models")
    return [small_classifier.written(folder, f"m{seed}", seed) for seed in range(20)]


def command(*words):
    words = (sys.executable, "-m", "app", *words)
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)


def test_what_a_model_takes_is_measured_shown_and_kept_for_the_next_start(tmp_path, models):
    cache = ("--cache-dir", str(tmp_path / "cache"))
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
    cache = ("--cache-dir", str(tmp_path / "cache"))
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
