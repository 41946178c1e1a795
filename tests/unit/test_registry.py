"""Which backend serves: the order, explicit choices, refusals, and the report of what works."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anychip_base.extras import NOT_INSTALLED
from anychip_tools import doctor
from app.config import Settings
from app.serving.opening import chosen
from backends import (
    Backend,
    BackendUnavailableError,
    Choice,
    Device,
    Executable,
    LoadedNetwork,
    LoadReport,
    Memory,
    Network,
    OutOfDeviceMemoryError,
    Probe,
    Telemetry,
    choose,
    detect,
    registry,
    report,
)
from backends.vendors import table as vendors
from backends.vendors.cpu import CpuBackend
from backends.vendors.torch_device import TorchBackend


class Accelerator(Backend):
    """A vendor that is not there: two devices, unless `reason`; `answer` is what it computes."""

    def __init__(self, name: str, reason: str = "", count: int = 2, answer: Any = None, automatic: bool = True) -> None:
        self.name = name
        self.facts = replace(CpuBackend.facts, vendor=name, device_type=name)
        if not automatic:
            self.facts = replace(self.facts, pretence=vendors.Pretence(True, 0, forks=True))
        self._reason, self._count, self._answer = reason, count, answer

    def probe(self) -> Probe:
        return Probe(not self._reason, self._reason)

    def devices(self) -> list[Device]:
        return [Device(f"{self.name}:{index}", "Chip", 2**30, "fp32") for index in range(self._count)]

    def load(
        self, network: Network, device: str, engine: str, precision: str, batch_sizes: Sequence[int], **_: Any
    ) -> LoadedNetwork:
        if self._answer is None:
            raise OutOfDeviceMemoryError("Somebody else has it all.")
        return LoadedNetwork(Answering(self._answer), LoadReport("quick", "fp32"))

    def memory(self, device: str) -> Memory:
        return Memory(0, 0, 0, 1)

    def release_cache(self, device: str) -> int:
        return 0

    def telemetry(self, device: str) -> Telemetry:
        return Telemetry()


class Answering(Executable):
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def run(self, pixels: Any) -> tuple[Any, ...]:
        return (np.array(self._answer),)

    def close(self) -> None:
        pass

    def _execute(self, pixels: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError


CPU = CpuBackend()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*table: Backend) -> None:
        monkeypatch.setattr(registry, "BACKENDS", table)

    return install


@pytest.mark.parametrize("device", ["auto", "all", "cpu", "cpu:0", "cpu:0, cpu:0"])
def test_the_cpu_is_found_by_every_name(backends: Any, device: str) -> None:
    backends(CPU)
    choice = choose(device)
    assert (choice.backend.name, choice.devices) == ("cpu", ("cpu:0",))


def test_auto_takes_the_first_that_is_available_with_all_its_devices(backends: Any) -> None:
    second = Accelerator("second")
    backends(Accelerator("first", "No driver."), second, CPU)
    assert choose("auto") == Choice(second, ("second:0", "second:1"), {"first": "No driver."})


def test_a_service_says_in_two_lines_what_serves_and_who_knows_why_others_do_not(
    backends: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backends(Accelerator("first", "No driver."), Accelerator("second", count=0), CPU)
    choice = choose("auto")
    assert choice.backend is CPU
    assert choice.refusals == {"first": "No driver.", "second": "second has no device that this process may use."}
    assert not caplog.records  # Of a command that only wants a device.
    caplog.set_level("INFO")
    given: dict[str, Any] = {}
    assert chosen(Settings(**given)) == choice
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"served by cpu:0 ({choice.device('cpu:0').name})"),
        ("WARNING", "no accelerator can be used, the CPU serves; anychip devices says why"),
    ]


def test_what_has_left_no_trace_is_not_here_and_what_has_is_broken(
    backends: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = tmp_path / "card0"
    facts = replace(vendors.AMD, device_files=(str(card),), packages=())
    backends(TorchBackend(facts), CPU)
    cards = detect.SystemEvidence(frozenset({facts.pci_vendor}))
    monkeypatch.setattr(detect, "system_evidence", lambda: cards)
    monkeypatch.setattr(TorchBackend, "_not_installed", lambda _: "This torch is not built for it.")
    assert [row.here for row in report()] == [False, True]
    card.touch()
    assert [(row.ok, row.here) for row in report()] == [(False, True), (True, True)]
    cards = detect.SystemEvidence(frozenset({"0x8086"}))  # Another vendor's makes a file of the same name.
    assert [row.here for row in report()] == [False, True]


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


def test_vendors_names_mean_their_backends(backends: Any) -> None:
    npu = Accelerator("npu")
    npu.facts = replace(npu.facts, aliases=("ascend",))
    backends(npu, CPU)
    assert choose("ascend").devices == ("npu:0", "npu:1")
    assert choose("ascend:1").devices == ("npu:1",)


def test_what_is_not_automatic_is_chosen_by_name_alone_and_not_reported(
    backends: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backends(Accelerator("pretended", automatic=False), CPU)
    assert choose("auto") == Choice(CPU, ("cpu:0",), {})
    assert not caplog.records  # nor is it missed
    assert choose("pretended").devices == ("pretended:0", "pretended:1")
    assert [row.device for row in report()] == ["cpu:0"]
    with pytest.raises(BackendUnavailableError, match="known are auto, pretended, cpu"):
        choose("gpu")


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


def test_report_fails_what_is_absent_broken_or_computes_wrongly(backends: Any) -> None:
    backends(
        Accelerator("absent", "No driver."),
        Accelerator("full", count=1),
        Accelerator("wrong", count=1, answer=[1, 2]),
        CPU,
    )
    absent, full, wrong, cpu = report()
    assert (absent.device, absent.ok, absent.detail) == ("absent", False, "No driver.")
    assert (full.device, full.ok, full.detail) == ("full:0", False, "Somebody else has it all.")
    assert (wrong.device, wrong.ok) == ("wrong:0", False)
    assert "[1, 2]" in wrong.detail
    assert cpu.ok


class Miscomputing(Accelerator):
    """One device, which computes what it is given after `harm` was done to it."""

    def __init__(self, harm: Callable[[Any], Any]) -> None:
        super().__init__("harmed", count=1)
        self._harm = harm

    def load(
        self, network: Network, device: str, engine: str, precision: str, batch_sizes: Sequence[int], **_: Any
    ) -> LoadedNetwork:
        assert isinstance(network, nn.Module)
        return LoadedNetwork(Computing(self._harm(network)), LoadReport("quick", "fp32"))


class Computing(Answering):
    def run(self, pixels: Any) -> tuple[Any, ...]:
        (answer,) = self._answer(torch.from_numpy(pixels))
        return (answer.numpy(),)


def scaled(name: str, factor: float) -> Callable[[Any], Any]:
    def harm(network: Any) -> Any:
        getattr(network, name).mul_(factor)
        return network

    return harm


def flipped(name: str, dimension: int) -> Callable[[Any], Any]:
    def harm(network: Any) -> Any:
        setattr(network, name, getattr(network, name).flip(dimension))
        return network

    return harm


def one_weight_off(name: str) -> Callable[[Any], Any]:
    def harm(network: Any) -> Any:
        getattr(network, name).view(-1)[7] += 1
        return network

    return harm


def after(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda network: lambda pixels: (change(network(pixels)[0]),)


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(scaled("kernel", 1.01), id="a convolution that is one per cent off"),
        pytest.param(flipped("kernel", 1), id="a convolution with its channels in another order"),
        pytest.param(flipped("kernel", 3), id="a convolution that is mirrored"),
        pytest.param(one_weight_off("kernel"), id="a convolution with one wrong weight"),
        pytest.param(after(lambda answer: answer.flip(0)), id="the answers of other images"),
        pytest.param(after(lambda answer: answer * float("nan")), id="no numbers"),
    ],
)
def test_a_device_that_computes_wrongly_is_found(backends: Any, harm: Callable[[Any], Any]) -> None:
    backends(Miscomputing(harm), CPU)
    harmed, cpu = report()
    assert (harmed.device, harmed.ok, cpu.ok) == ("harmed:0", False, True)
    assert harmed.detail.startswith("It computed [[")
    assert harmed.detail.endswith(" is right.")


@pytest.mark.parametrize("factor", [1, 1 + 1e-4])
def test_a_device_may_round(backends: Any, factor: float) -> None:
    backends(Miscomputing(scaled("kernel", factor)), CPU)
    assert [row.ok for row in report()] == [True, True]


def test_the_doctor_fails_a_device_that_computes_wrongly(backends: Any) -> None:
    backends(Miscomputing(scaled("matrix", 0.9)), CPU)
    given: dict[str, Any] = {"device": "harmed"}
    check = doctor._devices(Settings(**given))
    assert (check.status, check.detail[:21]) == ("FAIL", "harmed:0: It computed")
