"""`GET /v1/stats` and `anychip top`, which shows it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from anychip_tools.top import quantile, screen
from app.access.keys import add
from app.cli import main
from tests.support.images import GREY, JPEG, RED
from tests.support.service_process import running

PREDICT = "/v1/models/resnet18:predict"
NULL = ("--models", "resnet18", "--weights", "random", "--device", "null", "--engine", "auto", "--precision", "auto")


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 9.9), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_real_one(seconds, share):
    bounds = [0.01, 0.1, 0.5, 1, 5, 10, float("inf")]
    buckets = {str(bound): sum(each <= bound for each in seconds) for bound in bounds}
    real = sorted(seconds)[max(0, -(-int(share * len(seconds) * 1e9) // 10**9) - 1)]
    upper = next(bound for bound in bounds if bound >= real)
    lower = max([bound for bound in bounds if bound < upper], default=0)
    found = quantile(share, buckets)
    assert lower - 1e-9 <= found <= upper + 1e-9 or found == pytest.approx(lower) or found == pytest.approx(upper)


def test_a_quantile_of_nothing_is_none():
    assert quantile(0.5, {}) is None
    assert quantile(0.5, {"1.0": 0, "+Inf": 0}) is None
    assert quantile(0.99, {"1.0": 0, "+Inf": 5}) == 1.0


def test_the_numbers_are_those_of_the_metrics_and_top_shows_them(tmp_path):
    null = ("--null", "delay_ms=5,power_w=75,sick=1,devices=2,fail=#ff0000", "--queue-size", "32")
    with running(tmp_path, *NULL, *null) as service, service.client() as client:
        before = client.get("/v1/stats").json()
        for body in (GREY, GREY, RED):
            client.post(PREDICT, content=body, headers=JPEG)
        now = client.get("/v1/stats").json()
        [model] = now["models"]
        assert now["ready"]
        assert not now["simulated"]
        assert model["requests"] == {"OK": 2, "INFERENCE_FAILED": 1}
        assert (model["images"], model["images_computed"]) == (2, 4)
        assert model["queue_limit"] == 32
        assert model["retried"] == 1
        assert model["request_seconds"]["count"] == 2  # Of those that were answered.
        assert model["request_seconds"]["buckets"]["+Inf"] == 2
        assert model["stage_seconds"]["infer"]["seconds"] >= 2 * 0.005
        assert [device["device"] for device in now["devices"]] == ["null:0", "null:1"]
        assert sum(device["images"] for device in now["devices"]) == 4  # One of them twice.
        assert all(device["up"] and device["workers"] == 1 and device["power_watts"] == 75 for device in now["devices"])
        for device in now["devices"]:
            assert (device["healthy"], device["throttled"]) == (0, {"heat": 1, "power": 0})
            assert device["memory_errors"]["uncorrected"] is not None
        console = Console(width=80, record=True, file=sys.stdout)
        console.print(screen(before, now))
        text = console.export_text()
        assert "…" not in text
        assert "; q ends" not in text
        for word in ("resnet18", "null:1", "75 W", "50 °C", "0/32", "ready", "0.0/1.0", "bad", "1000 MHz", "heat"):
            assert word in text
        command = [sys.executable, "-m", "app", "top", "--url", service.url]
        once = subprocess.run([*command, "--once", "--interval-s", "0.1"], capture_output=True, text=True, check=True)
        assert "resnet18" in once.stdout
        said = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
        assert json.loads(said.stdout)["models"][0]["requests"]["OK"] == 2


def test_twenty_models_fit_a_terminal_the_busy_ones_first_and_only_who_administers_sees_clients(tmp_path):
    keys = tmp_path / "keys.txt"
    infer, admin = ({"X-Api-Key": add(keys, role, role)} for role in ("infer", "admin"))
    options = ("--null", "delay_ms=0", "--api-keys-file", str(keys))
    with running(tmp_path, *NULL, *options) as service, service.client() as client:
        before = client.get("/v1/stats", headers=admin).json()
        client.post(PREDICT, content=GREY, headers={**JPEG, **infer})
        seen, now = (client.get("/v1/stats", headers=key).json() for key in (infer, admin))
    assert seen["clients"] == []
    assert [each["client"] for each in now["clients"]] == ["key:infer", "key:admin"]
    [quiet], [busy] = before["models"], now["models"]
    before["models"] = [quiet | {"model": f"model{number}"} for number in range(20)]
    now["models"] = [(busy if number == 13 else quiet) | {"model": f"model{number}"} for number in range(20)]
    for height in (24, 40, 70):
        console = Console(width=80, record=True, file=sys.stdout)
        console.print(screen(before, now, height))
        text = console.export_text().rstrip("\n")
        assert text.count("\n") < height
        assert "; q ends" in text
        assert "model13" in text
        assert "key:infer" in text
        assert "null:0" in text
        assert ("more" in text) == (height == 24)


def test_top_says_in_one_sentence_that_nobody_answers(capsys):
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    assert capsys.readouterr().err.startswith("anychip: nothing answers at http://127.0.0.1:9")
    assert main(["top", "--interval-s", "0"]) == 1
