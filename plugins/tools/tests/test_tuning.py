"""The search of `anychip tune`: planted optima are found, budgets and latencies are kept; profiles and their rules."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anychip_tools.null.backend import NullBackend
from anychip_tools.tune import seconds_of
from anychip_tools.tuning import trials
from anychip_tools.tuning.search import Candidate, Search, Trial
from anychip_tools.tuning.trials import Trials
from app.arguments import CommandError
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


class Clock:
    """Each trial takes a second."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def searched(evaluate, *, budget_s=1000.0, p99_ms=inf, goal="throughput", starts=()):
    clock = Clock()

    def timed(candidate):
        clock.now_s += 1
        return evaluate(candidate)

    return Search(AXES, timed, budget_s=budget_s, clock=clock, p99_ms=p99_ms, goal=goal).run(DEFAULT, starts), clock


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


def test_energy_may_be_the_goal():
    def evaluate(candidate):
        return Trial(candidate, 10.0 * candidate.workers, 5, joules_per_image=float(candidate.workers))

    assert searched(evaluate, goal="energy")[0].best.candidate.workers == 1
    assert searched(evaluate)[0].best.candidate.workers == 4


def test_refused_settings_are_no_choice_and_default_settings_may_be_refused():
    def evaluate(candidate):
        return Trial(candidate, refusal="no") if candidate.engine == "a" else Trial(candidate, 1, 1)

    outcome, _ = searched(evaluate)
    assert outcome.best.candidate.engine in ("b", "c")
    assert len(outcome.comparison) == 2
    assert all(each.median.candidate.engine in ("b", "c") for each in outcome.comparison)


def test_what_wins_by_chance_does_not_win_the_comparison():
    seen: set[Candidate] = set()

    def evaluate(candidate):
        lucky = candidate not in seen and candidate.engine == "b"
        seen.add(candidate)
        return Trial(candidate, 200 if lucky else 90 if candidate.engine == "b" else 100, 1)

    outcome, _ = searched(evaluate)
    assert outcome.best.candidate == DEFAULT
    assert outcome.lead == 1.0
    assert outcome.lead_over_second == pytest.approx(100 / 90)


def test_defaults_that_win_the_trials_are_compared_with_the_second_best_in_turn():
    """Also a machine that gets slower and slower hits both alike, as they are measured one after the other."""
    asked = []

    def evaluate(candidate):
        asked.append(candidate)
        return Trial(candidate, 100 if candidate == DEFAULT else 90 - candidate.workers, 1)

    outcome, _ = searched(evaluate)
    second = replace(DEFAULT, engine="a", precision="bf16")
    assert asked[-6:] == [DEFAULT, second] * 3
    assert [each.median.candidate for each in outcome.comparison] == [DEFAULT, second]
    assert [each.images_per_s for each in outcome.comparison[0].rounds] == [100, 100, 100]
    assert outcome.lead_over_second == pytest.approx(100 / 89)
    assert outcome.best.candidate == DEFAULT
    assert outcome.lead == 1.0


def test_the_second_best_may_win_the_comparison():
    seen: set[Candidate] = set()

    def evaluate(candidate):
        unlucky = candidate not in seen
        seen.add(candidate)
        figure = {DEFAULT: 100.0, replace(DEFAULT, engine="b"): 99.0 if unlucky else 120.0}
        return Trial(candidate, figure.get(candidate, 50.0), 1)

    outcome, _ = searched(evaluate)
    assert outcome.best.candidate.engine == "b"
    assert (outcome.lead, outcome.lead_over_second) == (1.2, 1.2)


@pytest.mark.parametrize("budget_s", [2, 3.5, 9, 12])
def test_a_short_budget_ends_with_a_comparison_too(budget_s):
    outcome, clock = searched(planted(replace(DEFAULT, workers=4)), budget_s=budget_s)
    assert len(outcome.comparison) >= 2
    assert clock.now_s <= max(budget_s, 4), "two trials and two to compare them"


def test_an_engine_that_takes_long_to_compile_leaves_time_for_others():
    """Its first trial takes 20 s, every other one a second: in the comparison it is compiled."""
    clock, compiled = Clock(), set()

    def evaluate(candidate):
        clock.now_s += 20 if candidate.engine == "b" and candidate not in compiled else 1
        compiled.add(candidate)
        return Trial(candidate, 200 if candidate.engine == "b" else 100 + candidate.workers, 1)

    outcome = Search([ENGINE_AXIS, AXES[2]], evaluate, budget_s=60, clock=clock).run(DEFAULT)
    assert outcome.best.candidate.engine == "b"
    assert {each.candidate.engine for each in outcome.trials} == {"a", "b", "c"}
    assert clock.now_s <= 60 + 20


def test_one_setting_alone_is_compared_with_nothing():
    outcome, _ = searched(lambda each: Trial(each, 1, 1) if each == DEFAULT else Trial(each, refusal="no"))
    assert (outcome.comparison, outcome.lead, outcome.lead_over_second) == ([], 1.0, 1.0)


def test_the_engine_that_auto_stands_for_is_not_tried_again():
    rates = iter(range(100, 1000))  # By chance each trial is a little better than the last.
    default = replace(DEFAULT, engine="auto", precision="auto")

    def evaluate(candidate):
        named = ("b", "fp32") if candidate.engine == "auto" else (candidate.engine, candidate.precision)
        return Trial(candidate, next(rates) if named[0] == "b" else 1, 1, served=named)

    clock = Clock()
    outcome = Search([ENGINE_AXIS], evaluate, budget_s=100, clock=clock).run(default)
    assert outcome.best.candidate == default
    assert replace(DEFAULT, engine="b") not in [trial.candidate for trial in outcome.trials]


@pytest.mark.parametrize("budget_s", [0.5, 2.5])
def test_a_second_search_starts_from_what_was_best_before(budget_s):
    optimum = Candidate("c", "bf16", (1, 2, 4, 8, 16), 4, 8)
    outcome, _ = searched(planted(optimum), budget_s=budget_s, starts=(optimum,))
    assert outcome.best.candidate == optimum


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), ("2.5m", 150), ("7", 7)])
def test_a_budget_is_read(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1m", "0"])
def test_a_budget_that_makes_no_sense_is_refused(text):
    with pytest.raises(CommandError, match="budget"):
        seconds_of(text)


def test_a_trial_waits_for_the_precision_that_takes_over(monkeypatch):
    """bf16 of the same engine serves until int8 is ready: what is measured then is int8, and must be called so."""

    def answer(precision, staged):
        on = {"engine": "openvino", "precision": precision, "staged": staged}
        return httpx.Response(200, json={"models": [{"name": "m", "served_on": [on]}]})

    answers = iter([answer("bf16", True), answer("int8", False), "too late"])
    monkeypatch.setattr(trials.httpx, "get", lambda *_, **__: next(answers))
    monkeypatch.setattr(trials.time, "sleep", lambda _: None)
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


def test_a_broken_profile_is_left_alone(here, caplog):
    settings, choice, model = here
    path = store(PROFILE, settings, choice, model)
    path.write_text(path.read_text().replace('"1,4,16"', '"4,1"'))
    assert stored(settings, choice, model) is None
    assert "cannot be read" in caplog.text
