"""Which backend serves: explicit choices, refusals, the report, and what other packages bring."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from anychip_base.extras import NOT_INSTALLED
from backends import (
    Backend,
    BackendUnavailableError,
    Choice,
    Device,
    Executable,
    LoadedNetwork,
    LoadReport,
    Memory,
    OutOfDeviceMemoryError,
    Probe,
    Telemetry,
    choose,
    registry,
    report,
)
from backends.contract.errors import EngineRefusedError
from backends.engines import EagerEngine, engines_of
from backends.vendors import table as vendors
from backends.vendors.cpu import CpuBackend
from backends.vendors.table import Facts
from backends.vendors.torch_device import TorchBackend
from tests.support.networks import Brightness
from tests.support.rows import row


class Accelerator(Backend):
    """A vendor that is not there: two devices, unless `reason`; `harm` changes the network with which it computes."""

    def __init__(self, name: str, reason: str = "", count: int = 2, harm: Any = None, automatic: bool = True) -> None:
        self.name = name
        pretence = None if automatic else vendors.Pretence(True, 0, forks=True)
        self.facts = replace(CpuBackend.facts, vendor=name, device_type=name, pretence=pretence)
        self._reason, self._count, self._harm = reason, count, harm

    def probe(self) -> Probe:
        return Probe(not self._reason, self._reason)

    def devices(self) -> list[Device]:
        return [Device(f"{self.name}:{index}", "Chip", 2**30, "fp32") for index in range(self._count)]

    def load(self, network: Any, *_: Any, **__: Any) -> LoadedNetwork:
        if self._harm is None:
            raise OutOfDeviceMemoryError("Somebody else has it all.")
        self._harm(network)
        return LoadedNetwork(Computing(network), LoadReport("quick", "fp32"))

    def memory(self, device: str) -> Memory:
        return Memory(0, 0, 0, 1)

    def release_cache(self, device: str) -> int:
        return 0

    def telemetry(self, device: str) -> Telemetry:
        return Telemetry()


class Computing(Executable):
    def __init__(self, network: Any) -> None:
        super().__init__("cpu", (2,), network.input_shape)
        self._network = network

    def _execute(self, pixels: Any) -> tuple[Any, ...]:
        return tuple(each.numpy() for each in self._network(torch.from_numpy(pixels)))

    def _release(self) -> None:
        pass


CPU = CpuBackend()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *table: monkeypatch.setattr(registry, "BACKENDS", table)


def test_auto_takes_the_first_that_is_available_with_all_its_devices(backends: Any) -> None:
    second = Accelerator("second")
    backends(Accelerator("first", "No driver."), second, CPU)
    assert choose("auto") == Choice(second, ("second:0", "second:1"), {"first": "No driver."})


def test_auto_with_nothing_at_all_gives_every_reason(backends: Any) -> None:
    backends(Accelerator("first", "No driver."), Accelerator("second", "No chip."))
    with pytest.raises(BackendUnavailableError, match=r"first: No driver\. second: No chip\."):
        choose("auto")


def test_an_explicit_choice_that_fails_says_why_and_looks_no_further(backends: Any) -> None:
    backends(Accelerator("first", "No driver."), CPU)
    for device in ("first", "first:0"):
        with pytest.raises(BackendUnavailableError, match=r"^No driver\.$"):
            choose(device)


def test_several_devices_of_one_backend_are_chosen_in_order_and_once(backends: Any) -> None:
    backends(Accelerator("first"), CPU)
    assert choose("first:1,first:0,first:1").devices == ("first:1", "first:0")
    assert choose("all").devices == ("first:0", "first:1")
    with pytest.raises(BackendUnavailableError, match="several backends"):
        choose("first:0,cpu")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu:1", r"no device 'cpu:1'; there is cpu:0"),
        ("cpu:", r"no device 'cpu:'; there is cpu:0"),
        ("null", rf"the one called null, are not found: {re.escape(NOT_INSTALLED)}\.$"),
        ("cup", r"no device 'cup'; known are auto, first, cpu; did you mean cpu\?"),
        ("", r"known are auto, first, cpu\.$"),
    ],
)
def test_unknown_devices_are_refused_with_those_that_exist(backends: Any, device: str, message: str) -> None:
    backends(Accelerator("first"), CPU)
    with pytest.raises(BackendUnavailableError, match=message):
        choose(device)


def test_report_fails_what_is_absent_or_broken(backends: Any) -> None:
    backends(Accelerator("absent", "No driver."), Accelerator("full", count=1), CPU)
    absent, full, cpu = report()
    assert (absent.device, absent.ok, absent.detail) == ("absent", False, "No driver.")
    assert (full.device, full.ok, full.detail) == ("full:0", False, "Somebody else has it all.")
    assert cpu.ok


def answering(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda network: network.register_forward_hook(lambda _, __, answers: (change(answers[0]),))


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda each: each.kernel.mul_(1.01), id="a convolution that is one per cent off"),
        pytest.param(lambda each: each.kernel.copy_(each.kernel.flip(1)), id="its channels in another order"),
        pytest.param(lambda each: each.kernel.copy_(each.kernel.flip(3)), id="a convolution that is mirrored"),
        pytest.param(lambda each: each.kernel.view(-1)[7].add_(1), id="a convolution with one wrong weight"),
        pytest.param(answering(lambda answer: answer.flip(0)), id="the answers of other images"),
        pytest.param(answering(lambda answer: answer * float("nan")), id="no numbers"),
        pytest.param(answering(lambda answer: answer[:, :2]), id="of another shape"),
    ],
)
def test_a_device_that_computes_wrongly_is_found(backends: Any, harm: Callable[[Any], Any]) -> None:
    backends(Accelerator("harmed", count=1, harm=harm), CPU)
    harmed, cpu = report()
    assert (harmed.device, harmed.ok, cpu.ok) == ("harmed:0", False, True)
    assert harmed.detail.startswith("It computed [[")
    assert harmed.detail.endswith(" is right.")


# --- Backends, engines and finished files of other packages


class Brought(EagerEngine):
    name = "brought"


class Theirs(TorchBackend):
    pass


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """All backends with those of these rows, as if packages brought them; nothing of it stays."""
    monkeypatch.setattr(vendors, "_known", {row.name: row for row in (*vendors.ACCELERATORS, vendors.CPU)})

    def all_with(*rows: Facts) -> dict[str, Any]:
        entries = [EntryPoint(f"entry{number}", "theirs", registry.GROUP) for number in range(len(rows))]
        made = iter(map(Theirs, rows))
        monkeypatch.setattr(EntryPoint, "load", lambda self: next(made))
        monkeypatch.setattr(registry, "entry_points", lambda group: entries)
        return {each.name: each for each in registry._all()}

    return all_with


def test_a_package_for_a_vendor_of_ours_stands_in_its_place(found: Any) -> None:
    theirs = replace(vendors.ASCEND, engines=("brought", "eager"))
    names = list(found())
    backends = found(theirs)
    assert list(backends) == names
    assert type(backends["npu"]).__name__ == "Theirs"
    assert vendors.of_type("npu") == (theirs,)


@pytest.mark.parametrize("ours", [vendors.NVIDIA, vendors.CPU], ids=["another vendor", "the CPU"])
def test_the_name_of_another_vendor_is_refused_and_ours_stays(found: Any, ours: Facts) -> None:
    backends = found(replace(ours, vendor="cpu"))
    assert f"another backend called {ours.name}" in backends["entry0"].probe().reason
    assert type(backends[ours.name]).__name__ != "Theirs"
    assert ours in vendors.known()


def test_a_backend_brings_engines_of_its_own() -> None:
    facts = row("fp32", name="acme", title="Acme")
    facts = replace(facts, engines=("brought", "eager"))
    made = engines_of(facts, "auto", Brightness(), 1, (Brought,))
    assert [type(each) for each in made] == [Brought, EagerEngine]
    with pytest.raises(EngineRefusedError, match="Acme has no engine 'om'; it has brought and eager"):
        engines_of(facts, "om", Brightness(), 1, (Brought,))
