"""The null device: its grammar, the shape of its answers, and every fault it can be told to show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anychip_tools.behaviour import parse_null
from anychip_tools.null.backend import NullBackend, configure
from anychip_tools.verify.contract import SmallNetwork
from backends import (
    BACKENDS,
    BackendError,
    BackendUnavailableError,
    Executable,
    OutOfDeviceMemoryError,
    choose,
)
from models.catalog import open_model, parse_spec
from models.contract.model import Options

DEVICE = "null:0"
SHAPE = SmallNetwork.input_shape
MIB = 1 << 20
RED, GREY = (255, 0, 0), (128, 128, 128)


@pytest.fixture(autouse=True)
def _not_configured() -> Iterator[None]:
    configure("")
    yield
    configure("")


def loaded(behaviour: str, sizes: tuple[int, ...] = (1, 2, 4, 8), backend: NullBackend | None = None) -> Executable:
    configure(behaviour)
    return (backend or NullBackend()).load(SmallNetwork(), DEVICE, "auto", "auto", sizes).executable


def batch(*colours: tuple[int, int, int], places: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Images of one colour each, and places that are not filled."""
    pixels = np.zeros((places or len(colours), *SHAPE), dtype=np.uint8)
    for row, colour in enumerate(colours):
        pixels[row] = colour
    return pixels


# The grammar


@settings(deadline=None)
@given(st.one_of(st.text(), st.text("*>#=,0123456789abcfhilmnorsz_. -")))
def test_any_text_is_a_behaviour_or_one_sentence(text: str) -> None:
    sentence = ""
    try:
        parse_null(text)
    except BackendUnavailableError as error:
        sentence = str(error)
    assert len(sentence.splitlines()) <= 1


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("delay=5", "it knows devices, delay_ms, .*, nan"),
        ("devices=65", "whole number from 1 to 64"),
        ("delay_ms=nan", "number from 0"),
        ("image_delay_ms=2", "it is given twice"),
        ("crash=often", "a fault takes"),
    ],
)
def test_what_makes_no_sense_is_named_and_changes_nothing(part: str, reason: str) -> None:
    configure("load_ms=1")
    with pytest.raises(BackendUnavailableError, match=reason) as caught:
        configure(f"image_delay_ms=2,{part},fail=3")
    assert repr(part) in str(caught.value)
    assert os.environ["ANYCHIP_NULL"] == "load_ms=1"


# What it is to the rest


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("", False),
        ("devices=2,delay_ms=1,image_delay_ms=1,load_ms=1,memory_mb=64,leak_mb=0", False),
        ("leak_mb=1", True),
        ("hang=#000000", True),
    ],
)
def test_only_faults_and_leaks_read_pixels(text: str, reads: bool) -> None:
    configure(text)
    assert NullBackend().facts.reads_pixels is reads
    assert all(backend.facts.reads_pixels for backend in BACKENDS if backend.name != "null")


def test_it_is_chosen_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    configure("devices=2")
    assert choose("null").devices == ("null:0", "null:1")
    assert choose("null:1").devices == ("null:1",)
    with pytest.raises(BackendUnavailableError, match="no device 'null:2'; there is null:0, null:1"):
        choose("null:2")
    for text in ("devices=2", "crash=often"):
        monkeypatch.setenv("ANYCHIP_NULL", text)
        assert choose("auto").backend.name != "null"
    with pytest.raises(BackendUnavailableError, match="crash=often"):
        choose("null")


# Answers


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("resnet18:random", [((1000,), np.float32)]),
        ("yolov8n:random", [((2048, 4), np.float32), ((2048,), np.float32), ((2048,), np.int32), ((2048,), np.int32)]),
    ],
)
def test_models_get_answers_of_the_right_shape(
    spec: str, shapes: list[tuple[tuple[int, ...], Any]], tmp_path: Path
) -> None:
    model = open_model(parse_spec(spec), tmp_path, allow_download=False)
    network, ran_on = model.network(), []
    network.register_forward_pre_hook(lambda _, pixels: ran_on.append(pixels[0].device.type))
    executable, report = NullBackend().load(network, DEVICE, "null", "fp32", (4, 1))
    assert (report.engine, report.precision, executable.batch_sizes) == ("null", "fp32", (1, 4))
    for size in (1, 4):
        outputs = executable.run(np.ones((size, *model.input_shape), dtype=np.uint8))
        assert [(output.shape, output.dtype) for output in outputs] == [((size, *s), np.dtype(t)) for s, t in shapes]
        assert not any(output.any() for output in outputs)
        assert len(model.reduce(outputs, size - 1, Options())) > 0
    assert ran_on == ["cpu"], "once, for the shapes"


# Faults


def outcome(executable: Executable, pixels: np.ndarray[Any, Any]) -> str:
    try:
        outputs = executable.run(pixels)
    except BackendError as error:
        return {
            (OutOfDeviceMemoryError, f"{DEVICE} was told to run out of memory."): "oom",
            (BackendError, f"{DEVICE} was told to fail."): "fail",
        }[type(error), str(error)]
    assert not outputs[1].any()
    return "".join("n" if np.isnan(row).all() else "." for row in outputs[0])


BLUE, NEARLY_RED, TOO_FAR, NEARLY_BLACK = (0, 0, 255), (247, 8, 8), (255, 0, 9), (1, 1, 1)
TWO = batch(GREY, GREY)


@pytest.mark.parametrize(
    ("behaviour", "batches", "outcomes"),
    [
        ("fail=3,oom=*7,nan=5", [TWO] * 15, ". . fail . nan . oom . . . . . . oom ."),
        # Of batches of nothing none counts, as loading has run every size; the first fault that is pulled acts.
        ("fail=1,oom=>2", [batch(places=4), batch(places=8), batch(GREY)], ". . fail"),
        ("oom=>2,fail=>4", [batch(GREY, places=size) for size in (1, 2, 4, 8)], ". . oom oom"),
        ("fail=#FF0000", [batch(GREY, NEARLY_RED), batch(GREY, TOO_FAR)], "fail ."),
        ("nan=#ff0000,nan=#0000ff", [batch(RED, GREY, BLUE, GREY), TWO], "n.n. ."),
        ("nan=#000000", [batch(GREY, NEARLY_BLACK, places=4)], ".n.."),
    ],
)
def test_faults_come_to_the_batches_and_images_that_they_name(
    behaviour: str, batches: list[np.ndarray[Any, Any]], outcomes: str
) -> None:
    executable = loaded(behaviour)
    for pixels, wanted in zip(batches, outcomes.split(), strict=True):
        each = {".": "." * len(pixels), "nan": "n" * len(pixels)}.get(wanted, wanted)
        assert outcome(executable, pixels) == each


@pytest.mark.parametrize(("knob", "kept", "released"), [("cache", "cached", 6 * MIB), ("leak", "leaked", 0)])
def test_a_device_whose_memory_is_all_kept_has_none(knob: str, kept: str, released: int) -> None:
    backend = NullBackend()
    executable = loaded(f"{knob}_mb=3,memory_mb=7", (1,), backend)
    executable.run(batch(GREY))
    executable.run(batch(GREY))
    with pytest.raises(OutOfDeviceMemoryError, match=f"no memory left: it has {kept}"):
        executable.run(batch(GREY))
    assert backend.release_cache(DEVICE) == released
    assert backend.memory(DEVICE).used == 6 * MIB - released
