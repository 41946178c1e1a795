"""`anychip tune` on the null device, whose best settings are known; and a service that takes a profile up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from anychip_tools.child_service import serving
from anychip_tools.null import backend as null
from anychip_tools.tuning import trials
from anychip_tools.tuning.search import Candidate
from anychip_tools.tuning.trials import Trials
from app.cli import main
from app.config import Settings
from app.fleet.profiles import Profile, store, stored
from backends import choose
from models import open_model, parse_spec
from models.sample import IMAGES

ROOT = Path(__file__).parents[2]
IMAGE = min(IMAGES.glob("*.jpg")).read_bytes()
NULL = "delay_ms=30"
OPTIONS = ("--models", "resnet18", "--weights", "random", "--device", "null", "--null", NULL)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYCHIP_NULL", NULL)
    settings = Settings(cache_dir=tmp_path, null=NULL)
    null.configure(NULL)
    return settings, choose("null"), open_model(parse_spec("resnet18:random"), tmp_path)


def test_a_service_takes_a_profile_up_by_itself_and_names_it(here):
    settings, choice, model = here
    profile = Profile("found here", "null", "fp32", "1,16", 2, 2, 100.0, 50.0, 2.0)
    store(profile, settings, choice, model)
    with serving((*OPTIONS, "--cache-dir", str(settings.cache_dir))) as service:
        [served] = httpx.get(f"http://127.0.0.1:{service.port}/v1/models", trust_env=False).json()["models"]
    assert served["profile"] == "found here"
    assert [each["batch_sizes"] for each in served["served_on"]] == [[1, 16], [1, 16]]


def test_a_trial_says_what_a_candidate_reaches_and_why_another_does_not_serve(here):
    settings, _, _ = here
    options = (*OPTIONS, "--cache-dir", str(settings.cache_dir), "--profiles", "false")
    tried = Trials("resnet18", options, IMAGE, 1.0, 1e9, 1)
    good = tried.evaluate(Candidate("auto", "auto", (1, 4), 1, 2))
    assert good.served == ("null", "fp32")
    assert good.images_per_s > 0
    bad = tried.evaluate(replace(good.candidate, engine="abacus"))
    assert "abacus" in bad.refusal


def test_a_trial_begins_when_the_service_no_longer_computes_by_itself(monkeypatch):
    """Processor time of a service that still compiles for a while; a second core of it ends in between."""
    monkeypatch.setattr(trials.time, "sleep", lambda _: None)
    spent_s = iter([0, 0.25, 0.5, 0.51, 0.76, 0.4, 0.41, 0.42, 0.43, "too late"])
    monkeypatch.setattr(trials, "_processor_s", lambda _: next(spent_s))
    trials._wait_until_idle(1)
    assert next(spent_s) == "too late"


def test_a_command_that_is_ended_takes_its_service_with_it(tmp_path):
    arguments = ["tune", "resnet18", *OPTIONS[2:], "--cache-dir", str(tmp_path), "--json", "--seconds", "60"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen([sys.executable, "-m", "app", *arguments], cwd=tmp_path, env=environment)
    services: list[psutil.Process] = []
    while not services:
        assert command.poll() is None
        time.sleep(0.05)
        children = psutil.Process(command.pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            services = [child for child in children if "serve" in child.cmdline()]
    command.terminate()
    assert command.wait(60) == 128 + signal.SIGTERM
    assert not psutil.wait_procs(services, timeout=30)[1]


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # Its budget is five minutes, and it runs twice.
def test_a_planted_optimum_is_found_and_stored_and_a_second_run_starts_from_it(here, capsys):
    """Every batch takes 30 ms: the largest ladder is best by far."""
    settings, choice, model = here
    arguments = ["tune", "resnet18", *OPTIONS[2:], "--cache-dir", str(settings.cache_dir), "--json", "--seconds", "2"]
    narrow = ["--ladders", "1;1,2,4,8,16,32;1,2", "--workers", "1", "--decoder-counts", "2", "--budget", "5m"]
    assert main([*arguments, *narrow]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["candidate"]["batch_sizes"] == [1, 2, 4, 8, 16, 32]
    assert found["comparison"][0]["candidate"]["batch_sizes"] == [1, 2, 4, 8, 16, 32]
    assert found["lead"] > 1.2
    profile = stored(settings, choice, model)
    assert profile is not None
    assert profile.batch_sizes == "1,2,4,8,16,32"
    assert main([*arguments, *narrow, "--dry-run"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["started_from_profile"]
    assert again["trials"][1]["candidate"]["batch_sizes"] == [1, 2, 4, 8, 16, 32]
