"""A device that computes nothing: answers of the right shape after a chosen delay, and faults where it is told to fail.

Owns: the behaviour (`ANYCHIP_NULL`, docs/null.md), its faults and what they do to the process. It serves the tests of
the server, load tests, and whoever wants to see what the server does when a device misbehaves; `auto` never chooses it.
Must not be mistaken for hardware: its answers are zeros.

The worker warms every batch size with pictures that are all zero before it serves. A batch of such pictures is
therefore not counted: "the third batch" is the third that holds anything.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from backends.backend import (
    Array,
    Backend,
    BackendError,
    BackendUnavailableError,
    Device,
    EngineRefusedError,
    Executable,
    Facts,
    Memory,
    Network,
    OutOfDeviceMemoryError,
    Pixels,
    Probe,
    Telemetry,
)
from backends.engines import Engine, compile_first
from backends.engines.engine import CheckedExecutable

_VARIABLE = "ANYCHIP_NULL"
_TOLERANCE = 8  # Levels a channel: JPEG does not keep colours exactly.
_KINDS = ("fail", "crash", "hang", "freeze", "oom", "nan")
_TRIGGER = re.compile(r"(?P<sign>[*>]?)(?P<number>\d+)|#(?P<colour>[0-9a-fA-F]{6})")


@dataclass(frozen=True)
class Trigger:
    """Which batches: the `number`-th (``), every `number`-th (`*`), larger than it (`>`), or one with a `colour`."""

    sign: Literal["", "*", ">", "#"]
    number: int = 0
    colour: tuple[int, int, int] = (0, 0, 0)

    def rows(self, pixels: Pixels, counted: int) -> list[int]:
        """The rows of uint8 [n, height, width, 3] that pull it, all of them where the batch does."""
        if self.sign == "#":
            middle = pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2].astype(np.int16)
            return [int(row) for row in np.flatnonzero((np.abs(middle - self.colour) <= _TOLERANCE).all(axis=1))]
        pulled = {
            "": counted == self.number,
            "*": counted % max(1, self.number) == 0,
            ">": len(pixels) > self.number,
        }[self.sign]
        return list(range(len(pixels))) if pulled else []


@dataclass(frozen=True)
class Behaviour:
    """What the device does. Delays in milliseconds, memory in MiB; faults are (kind, trigger), in the order given."""

    devices: int = 1
    delay_ms: float = 0.0
    image_delay_ms: float = 0.0
    load_ms: float = 0.0
    memory_mb: int = 1024
    leak_mb: int = 0
    faults: tuple[tuple[str, Trigger], ...] = ()

    @property
    def looks_at_pixels(self) -> bool:
        """Whether it must see pictures: to count batches, and to find colours."""
        return bool(self.faults or self.leak_mb)


def parse(text: str) -> Behaviour:
    """`delay_ms=5,crash=*100` to a behaviour. Raises BackendUnavailableError, naming the part that makes no sense."""
    values: dict[str, Any] = {}
    faults: list[tuple[str, Trigger]] = []
    for part in (part.strip() for part in text.split(",")):
        key, _, value = part.partition("=")
        try:
            if not part:
                continue
            if key in _KINDS:
                faults.append((key, _trigger(value)))
            elif key in ("delay_ms", "image_delay_ms", "load_ms"):
                values[key] = _between(float(value), 0, 3.6e6)
            elif key in ("devices", "memory_mb", "leak_mb"):
                values[key] = int(_between(int(value), 0 if key == "leak_mb" else 1, 1 << 20))
            else:
                raise ValueError(key)
        except ValueError:
            known = ", ".join((*Behaviour.__dataclass_fields__, *_KINDS)).replace("faults, ", "")
            raise BackendUnavailableError(
                f"The null device does not understand {part!r}; it knows {known} (docs/null.md)."
            ) from None
    return Behaviour(**values, faults=tuple(faults))


def configure(text: str) -> None:
    """Set what the device does from now on, here and in the workers. Raises BackendUnavailableError."""
    parse(text)
    os.environ[_VARIABLE] = text


def _behaviour() -> Behaviour:
    return parse(os.environ.get(_VARIABLE, ""))


def _trigger(text: str) -> Trigger:
    found = _TRIGGER.fullmatch(text)
    if not found:
        raise ValueError(text)
    if found["colour"]:
        red, green, blue = bytes.fromhex(found["colour"])
        return Trigger("#", colour=(red, green, blue))
    number = int(found["number"])
    if number < 1:
        raise ValueError(text)
    sign: Any = found["sign"]
    return Trigger(sign, number)


def _between(value: float, least: float, most: float) -> float:
    if not least <= value <= most:  # NaN neither.
        raise ValueError(value)
    return value


class NullBackend(Backend):
    """Devices `null:0`, `null:1`, … as many as it is told to have."""

    name = "null"

    def __init__(self) -> None:
        self._leaked: list[Array] = []

    @property
    def facts(self) -> Facts:  # type: ignore[override]
        """As it is configured now."""
        text = os.environ.get(_VARIABLE, "")
        return Facts(
            vendor="null",
            device_type="null",
            engines=("null",),
            precisions=("fp32",),
            environment={_VARIABLE: text} if text else {},
            automatic=False,
            reads_pixels=parse(text).looks_at_pixels,
        )

    def probe(self) -> Probe:
        """Available, unless it is told what makes no sense."""
        try:
            _behaviour()
        except BackendUnavailableError as error:
            return Probe(False, str(error))
        return Probe(True)

    def devices(self) -> list[Device]:
        """As many as it is told to have."""
        behaviour = _behaviour()
        return [
            Device(f"null:{index}", "computes nothing", behaviour.memory_mb << 20, "fp32")
            for index in range(behaviour.devices)
        ]

    def load(
        self, network: Network, device: str, engine: str, precision: str, batch_sizes: Sequence[int]
    ) -> Executable:
        """As the contract says, after `load_ms`."""
        behaviour = _behaviour()
        if device not in [each.id for each in self.devices()]:
            raise BackendUnavailableError(f"There is no device {device!r}; there are {behaviour.devices} of null.")
        if engine not in ("auto", "null"):
            raise EngineRefusedError(f"The null device has no engine {engine!r}; it has null.")
        time.sleep(behaviour.load_ms / 1e3)
        chosen = "fp32" if precision == "auto" else precision
        return compile_first([_NullEngine(behaviour, self._leaked)], network, device, chosen, batch_sizes)

    def memory(self, device: str) -> Memory:
        """What has leaked is allocated; nothing else is."""
        leaked = sum(block.nbytes for block in self._leaked)
        return Memory(leaked, leaked, leaked, _behaviour().memory_mb << 20)

    def release_cache(self, device: str) -> int:
        """There is no cache, and a leak is what no release returns: 0."""
        return 0

    def telemetry(self, device: str) -> Telemetry:
        """It says nothing of itself."""
        return Telemetry()


class _NullEngine(Engine):
    name = "null"
    precisions = ("fp32",)

    def __init__(self, behaviour: Behaviour, leaked: list[Array]) -> None:
        self._behaviour = behaviour
        self._leaked = leaked

    def compile(self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...]) -> Executable:
        """Finds the shapes of the outputs on torch's meta device, where tensors have shapes and no values."""
        assert isinstance(network, nn.Module)
        network.to("meta")
        answers = {}
        with torch.inference_mode():
            for size in batch_sizes:
                outputs = network(torch.empty((size, *network.input_shape), dtype=torch.uint8, device="meta"))
                answers[size] = tuple(np.zeros(tuple(output.shape), dtype=np.float32) for output in outputs)
        return _NullExecutable(device, answers, network.input_shape, self._behaviour, self._leaked)


class _NullExecutable(CheckedExecutable):
    def __init__(
        self,
        device: str,
        answers: dict[int, tuple[Array, ...]],
        input_shape: tuple[int, int, int],
        behaviour: Behaviour,
        leaked: list[Array],
    ) -> None:
        super().__init__("null", device, "fp32", tuple(answers), input_shape)
        self._answers = answers
        self._behaviour = behaviour
        self._leaked = leaked
        self._counted = 0

    def _execute(self, pixels: Pixels) -> tuple[Array, ...]:
        behaviour = self._behaviour
        delay_ms = behaviour.delay_ms + behaviour.image_delay_ms * len(pixels)
        if delay_ms:
            time.sleep(delay_ms / 1e3)  # Releases the interpreter lock, as waiting for a device does.
        answers = self._answers[len(pixels)]
        if behaviour.looks_at_pixels and pixels.any():
            self._counted += 1
            self._leak()
            for kind, trigger in behaviour.faults:
                rows = trigger.rows(pixels, self._counted)
                if kind == "nan" and rows:
                    answers = tuple(_with_nan(answer, rows) for answer in answers)
                elif rows:
                    self._fault(kind)
        return answers

    def _leak(self) -> None:
        if self._behaviour.leak_mb:
            self._leaked.append(np.ones(self._behaviour.leak_mb << 20, dtype=np.uint8))

    def _fault(self, kind: str) -> None:
        """Raises BackendError, OutOfDeviceMemoryError, or does not come back."""
        if kind == "fail":
            raise BackendError(f"{self._device} was told to fail.")
        if kind == "oom":
            raise OutOfDeviceMemoryError(f"{self._device} was told to run out of memory.")
        if kind == "hang":
            threading.Event().wait()  # The interpreter lives on, as in a driver call that never returns.
        # A crash is how a driver's abort ends a process: at once. A frozen process does not even say that it lives.
        os.kill(os.getpid(), signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)

    def _release(self) -> None:
        self._answers = {}


def _with_nan(answer: Array, rows: list[int]) -> Array:
    answer = answer.copy()
    answer[rows] = np.nan
    return answer
