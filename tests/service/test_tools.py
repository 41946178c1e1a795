"""The tools against a running service: `bench`, `top`, `predict --url`, and `tune` with the profile that it stores."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from PIL import Image
from rich.console import Console

from anychip_tools import child_service
from anychip_tools.null import backend as null
from anychip_tools.top import screen
from app.cli import main
from app.config import Settings
from app.fleet.profiles import Profile, store
from backends import choose
from models import open_model, parse_spec
from tests.support.images import GREY, JPEG, RED
from tests.support.service_process import running


def bench(capsys, *arguments):
    code = main(["bench", *arguments, "--seconds", "0.5", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.xdist_group("shared service")
@pytest.mark.parametrize("protocol", ["predict", "v2"])
def test_every_protocol_is_answered_in_closed_and_open_loop(service, capsys, protocol):
    options = ("--protocol", protocol, "--connections", "2", "--rates", "5", "--timeout-ms", "20000")
    code, found = bench(capsys, "resnet18", "--url", service.url, *options)
    closed, opened = found["results"]
    assert code == 0
    assert (closed["mode"], opened["mode"]) == ("closed", "open")
    assert closed["images_per_s"] > 0
    assert 0 < closed["p50_ms"] <= closed["p99_ms"]
    assert closed["errors"] == opened["errors"] == 0


PREDICT = "/v1/models/resnet18:predict"
NULL = ("--models", "resnet18", "--weights", "random", "--device", "null", "--engine", "auto", "--precision", "auto")


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
        for word in ("resnet18", "null:1", "75 W", "50 °C", "0/32", "ready", "0.0/1.0"):
            assert word in text
        command = [sys.executable, "-m", "app", "top", "--url", service.url]
        once = subprocess.run([*command, "--once", "--interval-s", "0.1"], capture_output=True, text=True, check=True)
        assert "resnet18" in once.stdout
        said = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
        assert json.loads(said.stdout)["models"][0]["requests"]["OK"] == 2


def test_a_service_is_kept_busy_and_what_it_refuses_is_tried_again(tmp_path, capsys):
    for number in range(80):
        path = tmp_path / "in" / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 1)).save(path)
    (tmp_path / "in" / "99.jpg").write_text("no image")
    # More requests than may wait: some are refused with 429, and none is lost.
    null = (*NULL, "--null", "delay_ms=20", "--queue-size", "4")
    output = tmp_path / "out.jsonl"
    with running(tmp_path, *null) as service, service.client() as client:
        arguments = ["predict", "resnet18", str(tmp_path / "in"), "--url", service.url, "--output", str(output)]
        assert main([*arguments, "--parallel", "16"]) == 1
        stats = client.get("/v1/stats").json()["models"][0]
        assert main(["predict", "resnet19", str(tmp_path / "in"), "--url", service.url]) == 1
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    failed = [line for line in lines if "error" in line]
    assert len(lines) == 81
    assert len({line["file"] for line in lines}) == 81
    assert len(failed) == 1
    assert "INVALID_IMAGE" in failed[0]["error"]
    assert stats["requests"]["QUEUE_FULL"] > 0
    assert stats["images_computed"] > stats["batches"]
    said = capsys.readouterr().err
    assert "81 images, 1 failed" in said
    assert "there is no model 'resnet19'" in said


DELAY = "delay_ms=30"
OPTIONS = ("--models", "resnet18", "--weights", "random", "--device", "null", "--null", DELAY)


def test_a_service_takes_a_profile_up_by_itself_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYCHIP_NULL", DELAY)
    settings = Settings(cache_dir=tmp_path, null=DELAY)
    null.configure(DELAY)
    model = open_model(parse_spec("resnet18:random"), tmp_path)
    profile = Profile("found here", "null", "fp32", "1,16", 2, 2, 100.0, 50.0, 2.0)
    store(profile, settings, choose("null"), model)
    with child_service.serving((*OPTIONS, "--cache-dir", str(tmp_path))) as (port, _):
        [served] = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).json()["models"]
    assert served["profile"] == "found here"
    assert [each["batch_sizes"] for each in served["served_on"]] == [[1, 16], [1, 16]]


def a_little_later(number):
    threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), number)).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("send", [signal.raise_signal, a_little_later])
@pytest.mark.parametrize(
    "start", [lambda: child_service.run_group(["sleep", "99"]), lambda: child_service.serving(OPTIONS).__enter__()]
)
def test_a_signal_ends_the_child_of_a_tool_from_its_first_moment_on(monkeypatch, start, send, number):
    class Signalled(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            children.append(self)
            send(number)

    children: list[subprocess.Popen] = []
    monkeypatch.setattr(subprocess, "Popen", Signalled)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job ignores it.
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        start()
    signal.signal(signal.SIGINT, before)
    [child] = children
    assert child.poll() is not None
