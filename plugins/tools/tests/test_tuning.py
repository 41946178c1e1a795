"""The search of `anychip tune`: planted optima are found, budgets and latencies are kept; profiles and their rules."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anychip_tools import tuning
from anychip_tools.null.backend import NullBackend
from anychip_tools.tuning import Candidate, Search, Trial, Trials
from app.config import Settings
from app.fleet.profiles import Profile, of_model, store, stored, taken_up
from backends import Choice, Device
from models import open_model, parse_spec

LADDERS = ((1,), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16))
ENGINES = (("a", "fp32"), ("a", "bf16"), ("b", "fp32"), ("c", "bf16"))
ENGINE_AXIS = [{"engine": engine, "precision": precision} for engine, precision in ENGINES]
WORKERS, DECODERS = (1, 2, 4), (2, 4, 8)
AXES = [
    ENGINE_AXIS,
    [{"batch_sizes": ladder} for ladder in LADDERS],
    [{"workers": count} for count in WORKERS],
    [{"decoders": count} for count in DECODERS],
]
DEFAULT = Candidate("a", "fp32", (1, 2, 4), 1, 2)
candidates = st.builds(
    lambda engine, ladder, workers, decoders: Candidate(engine[0], engine[1], ladder, workers, decoders),
    *map(st.sampled_from, (ENGINES, LADDERS, WORKERS, DECODERS)),
)


def searched(evaluate, *, budget_s=1000.0, p99_ms=inf, starts=()):
    clock = SimpleNamespace(now_s=0.0)  # Each trial takes a second.

    def timed(candidate):
        clock.now_s += 1
        return evaluate(candidate)

    return Search(AXES, timed, budget_s=budget_s, clock=lambda: clock.now_s, p99_ms=p99_ms).run(DEFAULT, starts), clock


def planted(optimum):
    """Throughput that falls with the number of settings that are not the optimum's."""

    def evaluate(candidate):
        names = ("batch_sizes", "workers", "decoders")
        wrong = sum(getattr(candidate, name) != getattr(optimum, name) for name in names)
        wrong += (candidate.engine, candidate.precision) != (optimum.engine, optimum.precision)
        return Trial(candidate, 100 / 2**wrong, 10, served=(candidate.engine, candidate.precision))

    return evaluate


@given(candidates)
def test_a_planted_optimum_is_found(optimum):
    outcome, _ = searched(planted(optimum))
    assert outcome.best.candidate == optimum
    assert outcome.complete
    assert outcome.lead == pytest.approx(100 / outcome.default.images_per_s)
    assert outcome.lead_over_second == 2.0
    assert outcome.comparison[0].median.candidate == optimum


@given(candidates, st.floats(0, 12))
def test_a_budget_is_kept_and_the_best_is_never_worse_than_the_defaults(optimum, budget_s):
    outcome, clock = searched(planted(optimum), budget_s=budget_s)
    assert clock.now_s <= max(budget_s, 1) + 3, "the defaults, and one round of the comparison, are always paid for"
    assert outcome.best.images_per_s >= outcome.default.images_per_s


def test_latency_comes_before_throughput():
    def evaluate(candidate):
        return Trial(candidate, 10.0 * candidate.batch_sizes[-1], 5.0 * candidate.batch_sizes[-1])

    assert searched(evaluate, p99_ms=25)[0].best.candidate.batch_sizes == (1, 2, 4)
    assert searched(evaluate, p99_ms=1)[0].best.candidate.batch_sizes == (1,), "the quickest, where none keeps it"


def test_a_trial_waits_for_the_precision_that_takes_over(monkeypatch):
    """bf16 of the same engine serves until int8 is ready: what is measured then is int8, and must be called so."""

    def answer(precision, staged):
        on = {"engine": "openvino", "precision": precision, "staged": staged}
        return httpx.Response(200, json={"models": [{"name": "m", "served_on": [on]}]})

    answers = iter([answer("bf16", True), answer("int8", False), "too late"])
    monkeypatch.setattr(tuning.httpx, "get", lambda *_, **__: next(answers))
    monkeypatch.setattr(tuning.time, "sleep", lambda _: None)
    tried = Trials("m", (), b"", 1.0, inf, 1)
    assert tried._settled(1, Candidate("openvino", "int8", (1,), 1, 0)) == ("openvino", "int8")
    assert next(answers) == "too late"


PROFILE = Profile("resnet50 here", "openvino", "bf16", "1,4,16", 3, 2, 100.0, 20.0, 1.3)


@pytest.fixture
def here(tmp_path):
    device = Device("null:0", "computes nothing", 1 << 30, "fp32")
    choice = Choice(NullBackend(), ("null:0",), found=(device,))
    return Settings(cache_dir=tmp_path), choice, open_model(parse_spec("resnet50:random"), Path())


def test_a_profile_is_taken_up_where_nothing_else_was_said(here):
    settings, choice, model = here
    store(PROFILE, settings, choice, model)
    assert stored(settings, choice, model) == PROFILE
    taken, profiles = taken_up(settings, choice, [model])
    assert (taken.decoders, taken.workers_per_device) == (3, 2)
    assert profiles == {"resnet50": PROFILE}
    served = {"engine": "openvino", "precision": "bf16", "batch_sizes": (1, 4, 16), "grows": False}
    assert of_model(settings, PROFILE) == served


def test_what_was_said_stays(here):
    settings, choice, model = here
    said = Settings(cache_dir=settings.cache_dir, decoders=5, engine="eager")
    store(PROFILE, said, choice, model)
    taken, _ = taken_up(said, choice, [model])
    assert (taken.decoders, taken.workers_per_device) == (5, 2)
    assert of_model(said, PROFILE)["engine"] == "eager"
    assert of_model(said, PROFILE)["precision"] == "bf16"


def test_several_models_keep_their_own_and_share_the_service_s(here):
    settings, choice, model = here
    other = open_model(parse_spec("other=resnet50:random"), Path())
    store(PROFILE, settings, choice, model)
    taken, profiles = taken_up(settings, choice, [model, replace(other, weights="mine")])
    assert taken == settings
    assert set(profiles) == {"resnet50"}


def test_another_card_or_file_has_another_profile_and_a_switch_turns_them_off(here, tmp_path):
    settings, choice, model = here
    store(PROFILE, settings, choice, model)
    card = replace(choice.found[0], name="another")
    assert stored(settings, replace(choice, found=(card,)), model) is None
    assert stored(settings, choice, replace(model, weights="mine")) is None
    assert taken_up(settings.model_copy(update={"profiles": False}), choice, [model])[1] == {}


def test_another_user_s_profile_and_that_of_a_copy_elsewhere_are_taken_only_where_asked_for(
    here, monkeypatch, caplog, tmp_path
):
    settings, choice, random = here
    caplog.set_level("INFO")
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cars.pth").write_bytes(b"the same")
    copy, model = (replace(random, weights_file=str(tmp_path / each / "cars.pth")) for each in ("elsewhere", "here"))
    store(PROFILE, settings, choice, copy)
    assert stored(settings, choice, model) is None
    store(PROFILE, settings, choice, model)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert stored(settings, choice, model) is None
    assert caplog.text.count("--profiles true takes it") == 2
    assert stored(Settings(cache_dir=settings.cache_dir, profiles=True), choice, model) == PROFILE
