"""Which batch sizes a device gains from, found on planted curves; and that a start keeps them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anychip_tools.null import backend as null
from app.config import Settings
from app.fleet.profiles import of_model, store_sizes, taken_up
from app.worker.load import GAIN, grown, has_room
from app.worker.messages import LARGEST_BATCH
from backends import LoadReport, Memory, OutOfDeviceMemoryError, choose
from models import open_model, parse_spec

GIB = 1 << 30
EMPTY = Memory(0, GIB, GIB, 80 * GIB)


def loaded(fastest_s, precision, close):
    """Return a network that takes so long for batches of these sizes, and is measured already."""
    executable = SimpleNamespace(
        fastest_s=fastest_s, batch_sizes=[*fastest_s], buffer=lambda rows: [0] * rows, run=lambda _: None, close=close
    )
    return SimpleNamespace(executable=executable, report=LoadReport("graph", precision))


class Curve:
    """`fixed_s` a batch and `image_s` an image; `most`: the largest batch that its memory takes."""

    def __init__(self, fixed_s, image_s, most=1 << 20):
        self.fixed_s, self.image_s, self.most = fixed_s, image_s, most
        self.tried = []
        self.open = 0

    def latency_s(self, size):
        return self.fixed_s + self.image_s * size

    def made(self, sizes, engine="", precision="fp16"):
        if engine:  # A trial.
            [size] = sizes
            self.tried.append(size)
            if size > self.most:
                raise OutOfDeviceMemoryError("no memory")
        self.open += 1
        return loaded({size: self.latency_s(size) for size in sizes}, precision, self.close)

    def close(self):
        self.open -= 1

    def found(self, memory=EMPTY):
        first = self.made((1, 2, 4, 8))
        served, latency_s = grown(self.made, first, first.executable.fastest_s, lambda: memory)
        assert self.open == 1, "a trial was left open"
        assert served.executable.fastest_s == latency_s
        return tuple(latency_s)


@given(st.floats(0, 1), st.floats(1e-4, 1), st.integers(8, 200))
def test_every_size_that_is_served_pays_and_fits(fixed_s, image_s, most):
    device = Curve(fixed_s, image_s, most)
    first, *larger = [size for size in device.found() if size >= 8]
    assert first == 8
    for size in larger:
        assert size <= min(most, LARGEST_BATCH)
        assert size / device.latency_s(size) >= GAIN * (size // 2) / device.latency_s(size // 2)


def test_growth_ends_where_the_memory_does():
    assert Curve(0.1, 0.0001, most=32).found() == (1, 2, 4, 8, 16, 32)
    small = Curve(0.1, 0.0001)
    assert small.found(Memory(0, GIB, 2 * GIB, 4 * GIB)) == (1, 2, 4, 8)
    assert small.tried == []
    assert has_room(Memory(0, GIB, GIB, 4 * GIB))
    assert not has_room(Memory(0, GIB, GIB + 1, 4 * GIB))


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
