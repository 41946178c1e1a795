"""What is simulated: which device type, how many, and how they misbehave.

Owns: the grammar of `ANYCHIP_SIMULATE` (docs/simulation.md). Must not do anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.contract.errors import BackendUnavailableError
from backends.simulated.recorded import RECORDED
from backends.vendors import table as vendors
from backends.vendors.table import Facts

_MAX_DEVICES = 8  # as csrc/device.cpp has them
_MAX_NUMBER = 1 << 20
# The least and the most that a setting takes.
_RANGES = {
    "memory_mb": (1, _MAX_NUMBER),
    **dict.fromkeys(("cache_mb", "leak_mb", "copy_delay_ms", "oom", "lose", "others_mb"), (0, _MAX_NUMBER)),
    "graphs": (0, 1),
    "decode": (0, 1),
    "decode_off": (0, 255),
    "decode_error": (0, _MAX_NUMBER),
    "sick": (0, _MAX_DEVICES - 1),
}


@dataclass(frozen=True)
class Simulation:
    """Devices of one type. A batch is the outermost call of a module on the device with images that are not all zero:
    those of the warm-up are, and are not counted.

    `cache_mb`: what a batch leaves behind until the cache is released; `leak_mb`: until the process ends. `lacks`:
    operators the device has no kernel for. `oom`, `lose`: the batch, counted from 1 on each device in each process,
    that runs out of memory, or loses the device; 0: none. `others_mb`: what other processes hold of each device's
    memory. `graphs`: 1: it captures graphs. `sick`: the device that does not answer; -1: none. `fault`: the function of
    the device's module that fails as it was recorded; empty: none. `decode`: 1: it decodes JPEG; `decode_off`: grey
    levels by which its pixels are brighter; `decode_error`: the width of images that it cannot decode; 1: it can none.
    """

    device_type: str
    devices: int = 1
    memory_mb: int = 16_384
    cache_mb: int = 0
    leak_mb: int = 0
    copy_delay_ms: int = 0
    oom: int = 0
    lose: int = 0
    others_mb: int = 0
    graphs: int = 0
    sick: int = -1
    fault: str = ""
    decode: int = 0
    decode_off: int = 1
    decode_error: int = 0
    lacks: tuple[str, ...] = ()


def device_types() -> tuple[str, ...]:
    """The device types that can be simulated: those that are no part of torch, and whose row brings a sample."""
    return tuple(row.device_type for row in vendors.known() if row.sample)


def row_of(device_type: str) -> Facts:
    """The row of a device type that can be simulated. Raises StopIteration for another."""
    return next(row for row in vendors.of_type(device_type) if row.sample)


def parse(text: str) -> Simulation:
    """`npu:2,memory_mb=1024,cache_mb=8,lacks=aten::silu`. Raises BackendUnavailableError with one sentence."""
    first, *rest = (part.strip() for part in text.split(",") if part.strip())
    device_type, colon, count = first.partition(":")
    if device_type not in device_types():
        raise _wrong(text, f"{device_type!r} is none of {', '.join(device_types())}")
    numbers: dict[str, int] = {}
    if colon:
        numbers["devices"] = _number(text, "devices", count, 1, _MAX_DEVICES)
    lacks: list[str] = []
    fault = ""
    for part in rest:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name == "lacks" and "::" in value:
            lacks.append(value)
        elif name == "fault" and value in RECORDED:
            fault = value
        elif equals and name in _RANGES:
            numbers[name] = _number(text, name, value, *_RANGES[name])
        else:
            raise _wrong(
                text,
                f"{part!r} is no setting: there are {', '.join(_RANGES)} (numbers), fault ({', '.join(RECORDED)}) "
                "and lacks (an operator, such as aten::silu)",
            )
    return Simulation(device_type, lacks=tuple(lacks), fault=fault, **numbers)


def _number(text: str, name: str, value: str, least: int, most: int) -> int:
    if not (value.isascii() and value.isdigit() and least <= int(value) <= most):
        raise _wrong(text, f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return int(value)


def _wrong(text: str, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(f"The simulation {text!r} cannot be read: {reason}.")
