"""Which batch sizes a device gains from, found on planted curves; and how a start keeps them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anychip_tools.null import backend as null
from app.config import Settings
from app.fleet.plans import how_served
from app.fleet.profiles import Profile, of_model, store, store_sizes, taken_up
from app.worker.growth import GAIN, LARGEST, grown, has_room
from backends import DeviceLostError, LoadReport, Memory, OutOfDeviceMemoryError, choose
from models import NormalisedModel, PixelModel, open_model, parse_spec

GIB = 1 << 30
REPORT = LoadReport("graph", "fp16")
EMPTY = Memory(0, GIB, GIB, 80 * GIB)


class Device:
    """`fixed_s` a batch and `image_s` an image; `most`: the largest batch that its memory takes."""

    def __init__(self, fixed_s, image_s, most=1 << 20):
        self.fixed_s, self.image_s, self.most = fixed_s, image_s, most
        self.tried = []
        self.open = 0

    def latency_s(self, size):
        return self.fixed_s + self.image_s * size

    def make(self, size):
        self.tried.append(size)
        if size > self.most:
            raise OutOfDeviceMemoryError("no memory")
        self.open += 1
        return SimpleNamespace(executable=SimpleNamespace(size=size, close=self.close), report=REPORT)

    def close(self):
        self.open -= 1

    def found(self, memory=EMPTY):
        first = {size: self.latency_s(size) for size in (1, 2, 4, 8)}
        sizes = grown(REPORT, first, self.make, lambda made: {made.size: self.latency_s(made.size)}, lambda: memory)
        assert self.open == 0, "a trial was left open"
        return sizes


def test_a_card_with_much_to_gain_gets_large_batches_and_a_small_board_none():
    assert Device(0.100, 0.0001).found() == (1, 2, 4, 8, 16, 32, 64, 128)
    assert Device(0.020, 0.004).found() == (1, 2, 4, 8, 16, 32)
    board = Device(0.002, 0.150)
    assert board.found() == (1, 2, 4, 8)
    assert board.tried == []


@given(st.floats(0, 1), st.floats(1e-4, 1), st.integers(8, 200))
def test_every_size_that_is_served_pays_and_fits(fixed_s, image_s, most):
    device = Device(fixed_s, image_s, most)
    first, *larger = [size for size in device.found() if size >= 8]
    assert first == 8
    for size in larger:
        assert size <= min(most, LARGEST)
        assert size / device.latency_s(size) >= GAIN * (size // 2) / device.latency_s(size // 2)


def test_growth_ends_where_the_memory_does():
    assert Device(0.1, 0.0001, most=32).found() == (1, 2, 4, 8, 16, 32)
    small = Device(0.1, 0.0001)
    assert small.found(Memory(0, GIB, 2 * GIB, 4 * GIB)) == (1, 2, 4, 8)
    assert small.tried == []
    assert has_room(Memory(0, GIB, GIB, 4 * GIB))
    assert not has_room(Memory(0, GIB, GIB + 1, 4 * GIB))


def test_a_trial_in_which_the_device_is_lost_ends_the_worker():
    def lost(size):
        raise DeviceLostError("gone")

    with pytest.raises(DeviceLostError):
        grown(REPORT, {4: 0.1, 8: 0.1}, lost, lambda made: {}, lambda: EMPTY)


def test_a_size_in_which_the_gate_wants_another_precision_is_left_out():
    def finer(size):
        executable = SimpleNamespace(close=lambda: None)
        return SimpleNamespace(executable=executable, report=replace(REPORT, precision="fp32"))

    assert grown(REPORT, {4: 0.1, 8: 0.1}, finer, lambda made: {}, lambda: EMPTY) == (4, 8)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYCHIP_NULL", "")
    null.configure("")
    model = open_model(parse_spec("resnet18:random"), tmp_path)
    return Settings(cache_dir=tmp_path, device="null"), choose("null"), model


def test_sizes_that_a_start_has_found_are_those_of_the_next_one_which_measures_nothing(here):
    settings, choice, model = here
    first = of_model(settings, None)
    assert (first["batch_sizes"], first["grows"]) == ((1, 2, 4, 8), True)
    store_sizes((1, 2, 4, 8, 16), settings, choice, model)
    _, profiles = taken_up(settings, choice, [model])
    found = of_model(settings, profiles[model.name])
    assert (found["batch_sizes"], found["grows"]) == ((1, 2, 4, 8, 16), False)
    assert found["engine"] == "auto", "nothing else was found"


def test_sizes_hold_for_the_engine_with_which_they_were_found_and_come_after_those_of_tune(here):
    settings, choice, model = here
    store_sizes((1, 2, 4, 8, 16), settings, choice, model)
    other = Settings(cache_dir=settings.cache_dir, device="null", engine="null")
    assert taken_up(other, choice, [model])[1] == {}
    tuned = Profile("of tune", "null", "fp32", "1,64", 2, 1, 100.0, 50.0, 2.0)
    store(tuned, settings, choice, model)
    assert taken_up(settings, choice, [model])[1][model.name] == tuned


def test_batch_sizes_that_somebody_has_given_stay_and_auto_is_as_if_none_were(here):
    settings, choice, model = here
    store_sizes((1, 2, 4, 8, 16), settings, choice, model)
    for given_sizes, sizes in (("1,2", (1, 2)), ("auto", (1, 2, 4, 8, 16))):
        asked = Settings(cache_dir=settings.cache_dir, device="null", batch_sizes=given_sizes)
        how = of_model(asked, taken_up(asked, choice, [model])[1][model.name])
        assert (how["batch_sizes"], how["grows"]) == (sizes, False)
    without = Settings(cache_dir=settings.cache_dir, device="null", profiles=False)
    assert of_model(without, None)["grows"] is False


def test_the_form_of_a_model_that_takes_floats_does_not_grow(here):
    settings, _, model = here
    assert isinstance(model, PixelModel)
    assert how_served(settings, {}, model).grows
    assert not how_served(settings, {}, NormalisedModel.of(model)).grows
