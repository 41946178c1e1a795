"""The null device: its grammar, the shape of its answers, and every fault it can be told to show."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import fields
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

from anychip_tools.null.backend import NullBackend, configure
from anychip_tools.null.behaviour import Behaviour, Fault, Trigger, parse
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
from backends.contract.backend import Backend
from models.catalog import open_model, parse_spec
from models.contract.model import Options
from tests.support.work import calls

DEVICE = "null:0"
SHAPE = (8, 6, 3)
MIB = 1 << 20
RED, GREY = (255, 0, 0), (128, 128, 128)


class Summary(nn.Module):
    """Two numbers and a class per image, so that floats and integers both come out; `seen` says on what it ran."""

    input_shape = SHAPE

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.ones(2))
        self.seen: list[str] = []

    def cast(self, dtype: torch.dtype) -> None:
        pass

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        self.seen.append(pixels.device.type)
        # What a network does that insists on having parameters, not any tensors.
        weight = self.get_parameter("weight")
        mean = pixels.to(torch.float32).mean(dim=(1, 2, 3))
        return mean[:, None] * weight + self.get_buffer("offset"), pixels.to(torch.int32).amax(dim=(1, 2, 3))


class LooksAtValues(Summary):
    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        outputs = super().forward(pixels)
        return outputs if pixels.sum().item() >= 0 else ()


class BringsItsOwnTensors(Summary):
    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            output + torch.ones(1, 3, 1).sum(dim=2)[0, :1].to(output.dtype) for output in super().forward(pixels)
        )


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

TRIGGERS = st.one_of(
    st.builds(Trigger, st.sampled_from(["", "*", ">"]), st.integers(1, 999_999_999)),
    st.builds(lambda colour: Trigger("#", colour=tuple(colour)), st.binary(min_size=3, max_size=3)),
)
FAULTS = st.builds(Fault, st.sampled_from(["fail", "crash", "hang", "freeze", "oom", "nan"]), TRIGGERS)
DELAYS_MS = st.integers(0, 3_600_000_000).map(lambda us: us / 1000)
BEHAVIOURS = st.builds(
    Behaviour,
    devices=st.integers(1, 64),
    delay_ms=DELAYS_MS,
    image_delay_ms=DELAYS_MS,
    load_ms=DELAYS_MS,
    memory_mb=st.integers(1, MIB),
    leak_mb=st.integers(0, MIB),
    cache_mb=st.integers(0, MIB),
    power_w=st.integers(0, 100_000_000).map(lambda mw: mw / 1000),
    sick=st.integers(0, 1),
    depth=st.integers(1, 2),
    probes_mb=st.integers(0, 1024),
    output_mb=st.integers(0, 1024),
    import_ms=DELAYS_MS,
    faults=st.lists(FAULTS, max_size=4).map(tuple),
)


def written(behaviour: Behaviour) -> list[str]:
    settings = [field.name for field in fields(Behaviour) if field.name != "faults"]
    parts = [f"{name}={getattr(behaviour, name)}" for name in settings]
    for fault in behaviour.faults:
        trigger = fault.trigger
        which = "#" + bytes(trigger.colour).hex() if trigger.sign == "#" else f"{trigger.sign}{trigger.number}"
        parts.append(f"{fault.kind}={which}")
    return parts


@settings(deadline=None)
@given(BEHAVIOURS)
def test_a_behaviour_is_read_as_it_is_written(behaviour: Behaviour) -> None:
    assert parse(",".join(written(behaviour))) == behaviour
    assert parse(" , ".join(reversed(written(behaviour)[: len(fields(Behaviour)) - 1])) + ",") == Behaviour(
        **{field.name: getattr(behaviour, field.name) for field in fields(Behaviour) if field.name != "faults"}
    )


@settings(deadline=None)
@given(st.one_of(st.text(), st.text("*>#=,0123456789abcfhilmnorsz_. -")))
def test_any_text_is_a_behaviour_or_one_sentence(text: str) -> None:
    sentence = ""
    try:
        parse(text)
    except BackendUnavailableError as error:
        sentence = str(error)
    assert len(sentence.splitlines()) <= 1


def test_nothing_said_is_one_device_at_once_without_faults() -> None:
    assert parse("") == parse(" , ") == Behaviour(devices=1, memory_mb=1024, faults=())


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("delay=5", "it knows devices, delay_ms, .*, nan"),
        ("5", "it knows"),
        ("=5", "it knows"),
        ("devices", "whole number from 1 to 64"),
        ("devices=0", "whole number from 1 to 64"),
        ("devices=65", "whole number from 1 to 64"),
        ("devices=1.5", "whole number"),
        ("devices=1_0", "whole number"),
        ("devices=٣", "whole number"),
        ("delay_ms=-1", "number from 0 to 3600000"),
        ("delay_ms=nan", "number from 0"),
        ("delay_ms=inf", "number from 0"),
        ("delay_ms=1e3", "number from 0"),
        ("load_ms=3600000.5", "number from 0"),
        ("memory_mb=0", "from 1"),
        ("leak_mb=0.5", "whole number"),
        ("leak_mb=" + "9" * 5000, "whole number from 0"),
        ("crash=often", "a fault takes"),
        ("crash=", "a fault takes"),
        ("crash", "a fault takes"),
        ("crash=0", "a fault takes"),
        ("crash=*0", "a fault takes"),
        ("crash=>0", "a fault takes"),
        ("crash=<4", "a fault takes"),
        ("crash=#ff00", "a fault takes"),
        ("crash=#ff00001", "a fault takes"),
        ("crash=#red", "a fault takes"),
    ],
)
def test_what_makes_no_sense_is_named_and_changes_nothing(part: str, reason: str) -> None:
    configure("delay_ms=1")
    with pytest.raises(BackendUnavailableError, match=reason) as caught:
        configure(f"image_delay_ms=2,{part},fail=3")
    assert repr(part) in str(caught.value)
    assert os.environ["ANYCHIP_NULL"] == "delay_ms=1"


def test_a_setting_given_twice_is_refused_and_a_fault_is_not() -> None:
    with pytest.raises(BackendUnavailableError, match="'delay_ms=2': it is given twice"):
        parse("delay_ms=1,delay_ms=2")
    assert parse("fail=3,fail=*7").faults == (Fault("fail", Trigger("", 3)), Fault("fail", Trigger("*", 7)))


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


def test_it_is_chosen_by_name_alone() -> None:
    configure("devices=2")
    assert choose("null").devices == ("null:0", "null:1")
    assert choose("null:1").devices == ("null:1",)
    assert choose("auto").backend.name != "null"
    with pytest.raises(BackendUnavailableError, match="no device 'null:2'; there is null:0, null:1"):
        choose("null:2")


def test_told_nonsense_in_the_environment_it_says_so_when_asked_for_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYCHIP_NULL", "crash=often")
    assert choose("auto").backend.name != "null"
    with pytest.raises(BackendUnavailableError, match="crash=often"):
        choose("null")


def test_its_members_are_the_contract_s() -> None:
    def public(thing: Any) -> set[str]:
        return {name for name in dir(thing) if not name.startswith("_")}

    assert public(NullBackend()) == public(Backend) | {"name", "facts"}


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


@pytest.mark.parametrize("network_type", [LooksAtValues, BringsItsOwnTensors])
def test_a_network_is_run_once_for_its_shapes(network_type: type[Summary]) -> None:
    network = network_type()
    executable, _ = NullBackend().load(network, DEVICE, "null", "fp32", (2, 8))
    assert [(output.shape, output.dtype.name) for output in executable.run(batch(GREY, places=8))] == [
        ((8, 2), "float32"),
        ((8,), "int32"),
    ]
    assert network.seen == ["cpu"]


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


def test_a_run_without_delay_costs_nothing_to_speak_of() -> None:
    """It measures the server's overhead, so its own must not show: 27 calls, 2 µs where it was written."""
    executable = loaded("", (8,))
    pixels = batch(GREY, places=8)
    executable.run(pixels)
    assert calls(lambda: executable.run(pixels)) < 60


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


def test_the_third_batch_and_every_seventh() -> None:
    executable = loaded("fail=3,oom=*7,nan=5")
    outcomes = [outcome(executable, batch(GREY, places=2)) for _ in range(15)]
    assert outcomes == ["..", "..", "fail", "..", "nn", "..", "oom", *[".."] * 6, "oom", ".."]


def test_batches_of_nothing_are_not_counted() -> None:
    executable = loaded("fail=1,oom=>2")  # loading has run every size
    assert [outcome(executable, batch(places=size)) for size in (1, 4, 8)] == [".", "....", "." * 8]
    assert outcome(executable, batch(GREY)) == "fail"


def test_models_of_one_device_are_counted_together_and_devices_apart() -> None:
    configure("devices=2,fail=2")
    backend = NullBackend()
    one, other = (backend.load(Summary(), DEVICE, "auto", "auto", (1,)).executable for _ in range(2))
    elsewhere = backend.load(Summary(), "null:1", "auto", "auto", (1,)).executable
    assert [outcome(each, batch(GREY)) for each in (one, elsewhere, other, one)] == [".", ".", "fail", "."]


def test_batches_larger_than() -> None:
    executable = loaded("oom=>2,fail=>4")  # the first fault that is pulled acts
    assert [outcome(executable, batch(GREY, places=size)) for size in (1, 2, 4, 8)] == [".", "..", "oom", "oom"]


def test_a_colour_within_eight_levels_in_the_middle() -> None:
    executable = loaded("fail=#FF0000")
    near, far = (247, 8, 8), (255, 0, 9)
    assert outcome(executable, batch(GREY, near)) == "fail"
    assert outcome(executable, batch(GREY, far)) == ".."
    framed = batch(RED)
    framed[0, SHAPE[0] // 2, SHAPE[1] // 2] = GREY
    assert outcome(executable, framed) == "."
    dot = batch(GREY)
    dot[0, SHAPE[0] // 2, SHAPE[1] // 2] = RED
    assert outcome(executable, dot) == "fail"


def test_a_colour_makes_its_own_image_nan_alone() -> None:
    executable = loaded("nan=#ff0000,nan=#0000ff")
    assert outcome(executable, batch(RED, GREY, (0, 0, 255), GREY)) == "n.n."
    assert outcome(executable, batch(GREY, GREY)) == ".."  # nothing of it stays


def test_places_not_filled_are_no_black_images() -> None:
    executable = loaded("nan=#000000")
    black = batch(GREY, (1, 1, 1), places=4)
    assert outcome(executable, black) == ".n.."


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


def test_a_device_whose_memory_is_all_cached_has_none() -> None:
    backend = NullBackend()
    executable = loaded("cache_mb=3,memory_mb=7", (1,), backend)
    executable.run(batch(GREY))
    executable.run(batch(GREY))
    with pytest.raises(OutOfDeviceMemoryError, match="no memory left: it has cached"):
        executable.run(batch(GREY))
    assert backend.release_cache(DEVICE) == 6 * MIB
    executable.run(batch(GREY))


def test_a_device_that_has_leaked_everything_has_no_memory() -> None:
    backend = NullBackend()
    executable = loaded("leak_mb=3,memory_mb=7", (1,), backend)
    executable.run(batch(GREY))
    executable.run(batch(GREY))
    with pytest.raises(OutOfDeviceMemoryError, match="no memory left: it has leaked"):
        executable.run(batch(GREY))
    assert backend.memory(DEVICE).used == 6 * MIB


def test_a_host_without_memory_is_a_device_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    executable = loaded("leak_mb=1", (1,))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OutOfDeviceMemoryError, match="Cannot allocate memory"):
        executable.run(batch(GREY))


# Faults that take the process with them: one batch that is fine, one that is not, and a thread that says it lives.

CHILD = """
import atexit, threading
import numpy as np, torch
from anychip_tools.null.backend import NullBackend

class Mean(torch.nn.Module):
    input_shape = (8, 6, 3)
    def cast(self, dtype): pass
    def forward(self, pixels): return (pixels.float().mean(dim=(1, 2, 3)),)

def beat():
    while not ended.wait(0.01):
        print("beat", flush=True)

atexit.register(print, "cleaned up", flush=True)
executable, _ = NullBackend().load(Mean(), "null:0", "auto", "auto", (1, 2))
ended = threading.Event()
heart = threading.Thread(target=beat, daemon=True)
heart.start()
for number in (1, 2):
    executable.run(np.ones((1, 8, 6, 3), np.uint8))
    print("answered", number, flush=True)
ended.set()
heart.join()
"""


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "ANYCHIP_NULL": request.param, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=-1, text=True, env=environment, cwd=root) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("child", ["crash=2"], indirect=True)
def test_a_crash_ends_the_process_at_once(child: subprocess.Popen[str]) -> None:
    said = child.communicate()[0].splitlines()
    assert child.returncode == -signal.SIGKILL
    assert "answered 1" in said
    assert not {"answered 2", "cleaned up"} & set(said)


@pytest.mark.parametrize("child", ["hang=2"], indirect=True)
def test_a_hang_leaves_the_process_alive(child: subprocess.Popen[str]) -> None:
    said: list[str] = []
    assert child.stdout is not None
    while "answered 1" not in said:
        said.append(child.stdout.readline().strip())
        assert said[-1], "the process ended"
    after = [child.stdout.readline().strip() for _ in range(50)]
    assert after == ["beat"] * 50
    assert child.poll() is None


@pytest.mark.parametrize("child", ["freeze=2"], indirect=True)
def test_a_freeze_stops_the_process_until_it_is_continued(child: subprocess.Popen[str]) -> None:
    _, status = os.waitpid(child.pid, os.WUNTRACED)  # Returns when it is stopped, or has ended.
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED
    os.kill(child.pid, signal.SIGCONT)
    said = child.communicate()[0].splitlines()
    assert child.returncode == 0
    assert said[-1] == "cleaned up"
    assert {"answered 1", "answered 2"} <= set(said)


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
