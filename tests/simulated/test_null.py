"""The null device: its grammar, the shape of its answers, and every fault it can be told to show."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import Field, fields
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anychip_tools.knobs import knobs
from anychip_tools.null.backend import NullBackend, configure
from anychip_tools.null.behaviour import Behaviour, Fault, parse
from backends import (
    BACKENDS,
    BackendError,
    BackendUnavailableError,
    EngineRefusedError,
    Executable,
    Memory,
    OutOfDeviceMemoryError,
    choose,
)
from models.catalog import open_model, parse_spec
from models.contract.model import Options

DEVICE = "null:0"
SHAPE = (8, 6, 3)
MIB = 1 << 20
RED, GREY = (255, 0, 0), (128, 128, 128)


class Summary(nn.Module):
    """Two numbers and a class per image, so that floats and integers both come out."""

    input_shape = SHAPE

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def cast(self, dtype: torch.dtype) -> None:
        pass

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        mean = pixels.to(torch.float32).mean(dim=(1, 2, 3))
        return mean[:, None] * self.weight, pixels.to(torch.int32).amax(dim=(1, 2, 3))


class Broken(Summary):
    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("a kernel is missing")


class MixesImages(Summary):
    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return (pixels.to(torch.float32).mean(dim=0, keepdim=True).repeat(3, 1, 1, 1),)


@pytest.fixture(autouse=True)
def _not_configured() -> Iterator[None]:
    configure("")
    yield
    configure("")


def loaded(behaviour: str, sizes: tuple[int, ...] = (1, 2, 4, 8), backend: NullBackend | None = None) -> Executable:
    configure(behaviour)
    return (backend or NullBackend()).load(Summary(), DEVICE, "auto", "auto", sizes).executable


def batch(*colours: tuple[int, int, int], places: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Images of one colour each, and places that are not filled."""
    pixels = np.zeros((places or len(colours), *SHAPE), dtype=np.uint8)
    for row, colour in enumerate(colours):
        pixels[row] = colour
    return pixels


# The grammar

KINDS = st.sampled_from(["fail", "crash", "hang", "freeze", "oom", "nan"])
FAULTS = st.one_of(
    st.builds(Fault, KINDS, st.sampled_from(["", "*", ">"]), st.integers(1, 999_999_999)),
    st.builds(Fault, KINDS, st.just("#"), colour=st.binary(min_size=3, max_size=3).map(tuple)),
)


def numbers(field: Field[Any]) -> st.SearchStrategy[float]:
    least, most = field.metadata["range"]
    if isinstance(field.default, int):
        return st.integers(least, most)
    return st.integers(least * 1000, most * 1000).map(lambda thousandths: thousandths / 1000)


@settings(deadline=None)
@given(
    st.fixed_dictionaries({name: numbers(field) for name, field in knobs(Behaviour).items()}),
    st.lists(FAULTS, max_size=4).map(tuple),
)
def test_a_behaviour_is_read_as_it_is_written(given: dict[str, float], faults: tuple[Fault, ...]) -> None:
    parts = [f"{name}={value}" for name, value in given.items()]
    assert parse(" , ".join(reversed(parts)) + ",") == Behaviour(**given)  # type: ignore[arg-type]
    for fault in faults:
        which = bytes(fault.colour).hex() if fault.sign == "#" else fault.number
        parts.append(f"{fault.kind}={fault.sign}{which}")
    assert parse(",".join(parts)) == Behaviour(**given, faults=faults)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.one_of(st.text(), st.text("*>#=,0123456789abcfhilmnorsz_. -")))
def test_any_text_is_a_behaviour_or_one_sentence(text: str) -> None:
    sentence = ""
    try:
        parse(text)
    except BackendUnavailableError as error:
        sentence = str(error)
    assert len(sentence.splitlines()) <= 1


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("delay=5", "it knows devices, delay_ms, .*, nan"),
        ("=5", "it knows"),
        ("devices", "whole number from 1 to 64"),
        ("devices=65", "whole number from 1 to 64"),
        ("devices=1_0", "whole number"),
        ("devices=٣", "whole number"),
        ("delay_ms=-1", "number from 0 to 3600000"),
        ("delay_ms=nan", "number from 0"),
        ("load_ms=3600000.5", "number from 0"),
        ("memory_mb=0", "from 1"),
        ("leak_mb=" + "9" * 5000, "whole number from 0"),
        ("image_delay_ms=2", "it is given twice"),
        ("crash=often", "a fault takes"),
        ("crash=*0", "a fault takes"),
        ("crash=<4", "a fault takes"),
        ("crash=#ff00001", "a fault takes"),
    ],
)
def test_what_makes_no_sense_is_named_and_changes_nothing(part: str, reason: str) -> None:
    configure("load_ms=1")
    with pytest.raises(BackendUnavailableError, match=reason) as caught:
        configure(f"image_delay_ms=2,{part},fail=3")
    assert repr(part) in str(caught.value)
    assert os.environ["ANYCHIP_NULL"] == "load_ms=1"


# What it is to the rest


def test_a_process_started_from_here_is_told() -> None:
    configure("delay_ms=5")
    assert NullBackend().facts.environment == {"ANYCHIP_NULL": "delay_ms=5"}
    assert os.environ["ANYCHIP_NULL"] == "delay_ms=5"
    configure(" ")
    assert NullBackend().facts.environment == {}
    assert "ANYCHIP_NULL" not in os.environ


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("", False),
        ("devices=2,delay_ms=1,image_delay_ms=1,load_ms=1,memory_mb=64,leak_mb=0", False),
        ("leak_mb=1", True),
        ("cache_mb=1", True),
        ("fail=3", True),
        ("nan=>4", True),
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


def test_it_says_that_it_computes_nothing_and_no_more() -> None:
    configure("devices=2,memory_mb=64")
    backend = NullBackend()
    assert [(device.id, device.name, device.memory_bytes) for device in backend.devices()] == [
        ("null:0", "computes nothing", 64 * MIB),
        ("null:1", "computes nothing", 64 * MIB),
    ]
    telemetry = backend.telemetry(DEVICE)
    assert all(isnan(getattr(telemetry, field.name)) for field in fields(telemetry))


def test_other_devices_engines_precisions_and_sizes_are_refused_by_name() -> None:
    backend = NullBackend()
    with pytest.raises(EngineRefusedError, match="no engine 'eager'; it has null"):
        backend.load(Summary(), DEVICE, "eager", "fp32", (1,))
    with pytest.raises(EngineRefusedError, match="null: it offers fp32 here, not bf16"):
        backend.load(Summary(), DEVICE, "null", "bf16", (1,))
    with pytest.raises(ValueError, match="positive"):
        backend.load(Summary(), DEVICE, "null", "fp32", (0, 1))
    for ask in (backend.memory, backend.release_cache, backend.telemetry):
        with pytest.raises(BackendUnavailableError, match="no device 'null:1'; there is null:0"):
            ask("null:1")
    with pytest.raises(BackendUnavailableError, match="no device 'cpu:0'"):
        backend.load(Summary(), "cpu:0", "null", "fp32", (1,))


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


@pytest.mark.parametrize(
    ("network", "reason"),
    [(Broken(), "a kernel is missing"), (MixesImages(), "answers 1 images with")],
    ids=["broken", "mixes-images"],
)
def test_a_network_that_no_device_could_serve_is_refused(network: Summary, reason: str) -> None:
    with pytest.raises(EngineRefusedError, match=reason):
        NullBackend().load(network, DEVICE, "null", "fp32", (1, 2))


def test_other_pixels_are_refused_and_so_is_everything_once_closed() -> None:
    network = Summary()
    weights = weakref.ref(network.weight)
    executable, _ = NullBackend().load(network, DEVICE, "null", "fp32", (2,))
    del network
    gc.collect()
    assert weights() is None  # It needs none.
    with pytest.raises(ValueError, match="batch of 1"):
        executable.run(batch(GREY))
    executable.close()
    executable.close()
    with pytest.raises(BackendError, match="closed"):
        executable.run(batch(GREY, GREY))


def test_time_passes_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    configure("delay_ms=5,image_delay_ms=0.5,load_ms=2000")
    executable, _ = NullBackend().load(Summary(), DEVICE, "null", "fp32", (1, 8))
    assert slept == pytest.approx([2.0, 0.0055, 0.009])  # the start, then a run of every size
    slept.clear()
    executable.run(batch(GREY, places=8))
    assert slept == pytest.approx([0.009])  # every place of a batch takes its time, filled or not


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
        (
            "fail=3,oom=*7,nan=5",
            [TWO] * 15,
            ". . fail . nan . oom . . . . . . oom .",
        ),
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


def test_the_colour_of_an_image_is_that_of_its_middle() -> None:
    executable = loaded("fail=#FF0000")
    for colour, middle, wanted in ((RED, GREY, "."), (GREY, RED, "fail")):
        pixels = batch(colour)
        pixels[0, SHAPE[0] // 2, SHAPE[1] // 2] = middle
        assert outcome(executable, pixels) == wanted


def test_models_of_one_device_are_counted_together_and_devices_apart() -> None:
    configure("devices=2,fail=2")
    backend = NullBackend()
    one, other = (backend.load(Summary(), DEVICE, "auto", "auto", (1,)).executable for _ in range(2))
    elsewhere = backend.load(Summary(), "null:1", "auto", "auto", (1,)).executable
    assert [outcome(each, batch(GREY)) for each in (one, elsewhere, other, one)] == [".", ".", "fail", "."]


def test_a_leak_is_real_counted_and_beyond_the_cache() -> None:
    backend, process = NullBackend(), psutil.Process()
    executable = loaded("leak_mb=32,memory_mb=200,devices=2", (1,), backend)
    assert backend.memory(DEVICE).used == 0  # warming up leaks nothing
    before = process.memory_info().rss
    for _ in range(4):
        executable.run(batch(GREY))
    executable.run(batch(places=1))
    assert process.memory_info().rss - before > 120 * MIB
    memory = backend.memory(DEVICE)
    assert (memory.allocated, memory.reserved, memory.used, memory.total) == (*[128 * MIB] * 3, 200 * MIB)
    assert backend.release_cache(DEVICE) == 0
    executable.close()
    assert backend.memory(DEVICE) == memory
    assert backend.memory("null:1").used == 0


def test_a_cache_is_reserved_until_it_is_released_and_a_leak_stays() -> None:
    backend = NullBackend()
    executable = loaded("cache_mb=3,leak_mb=1,memory_mb=64", (1,), backend)
    assert backend.memory(DEVICE).used == 0  # warming up keeps nothing
    executable.run(batch(GREY))
    executable.run(batch(GREY))
    assert backend.memory(DEVICE) == Memory(2 * MIB, 8 * MIB, 8 * MIB, 64 * MIB)
    assert backend.release_cache(DEVICE) == 6 * MIB
    assert backend.memory(DEVICE) == Memory(2 * MIB, 2 * MIB, 2 * MIB, 64 * MIB)
    assert backend.release_cache(DEVICE) == 0


@pytest.mark.parametrize(("kept", "released"), [("cached", 6 * MIB), ("leaked", 0)])
def test_a_device_whose_memory_is_all_kept_has_none(kept: str, released: int) -> None:
    backend = NullBackend()
    executable = loaded(f"{kept.replace('cached', 'cache').replace('leaked', 'leak')}_mb=3,memory_mb=7", (1,), backend)
    executable.run(batch(GREY))
    executable.run(batch(GREY))
    with pytest.raises(OutOfDeviceMemoryError, match=f"no memory left: it has {kept}"):
        executable.run(batch(GREY))
    assert backend.release_cache(DEVICE) == released
    assert backend.memory(DEVICE).used == 6 * MIB - released


def test_a_host_without_memory_is_a_device_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    executable = loaded("leak_mb=1", (1,))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OutOfDeviceMemoryError, match="Cannot allocate memory"):
        executable.run(batch(GREY))


def test_told_its_power_it_says_how_much_energy_that_was_and_how_busy_it_is() -> None:
    backend = NullBackend()
    executable = loaded("power_w=200,delay_ms=5", (1,), backend)
    first = backend.telemetry(DEVICE)
    for _ in range(4):
        executable.run(batch(GREY))
    second = backend.telemetry(DEVICE)
    assert (second.power_watts, second.temperature_celsius) == (200, 50)
    assert second.energy_joules - first.energy_joules >= 200 * 4 * 0.005
    assert 0 < second.utilization_ratio <= 1
