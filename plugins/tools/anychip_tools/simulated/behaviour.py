"""Simulation: the device type, the number of devices, and their faults.

Owns: the grammar of `ANYCHIP_SIMULATE` (docs/simulation.md). Must not do anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anychip_tools.knobs import knob, knobs, value_of
from anychip_tools.simulated.recorded import RECORDED
from backends.contract.errors import BackendUnavailableError
from backends.vendors import table as vendors
from backends.vendors.table import Facts

_MAX_DEVICES = 8  # the same in csrc/device.cpp
_MAX_NUMBER = 1 << 20


@dataclass(frozen=True)
class Simulation:
    """Devices of one type. A batch is the outermost call of a module on the device with images that are not all zero:
    those of the warm-up are, and are not counted.

    `cache_mb`: memory that a batch leaves in the cache; `leak_mb`: memory that it leaks for good. `lacks`:
    operators without a kernel on the device. `oom`, `lose`: the batch, counted from 1 on each device in each process,
    that runs out of memory, or loses the device; 0: none. `others_mb`: what other processes hold of each device's
    memory; `model_mb`: memory that each model takes beside its tensors; `load_ms`: time added to each load.
    `graphs`: 1: it captures graphs. `sick`: the device that does not answer; -1: none. `fault`: the function of the
    device's module that fails as it was recorded; empty: none. `decode`: 1: it decodes JPEG; `decode_off`: grey levels
    by which its pixels are brighter; `decode_error`: width of the images that it cannot decode; 1: it decodes none.
    """

    device_type: str
    devices: int = knob(1, 1, _MAX_DEVICES)
    memory_mb: int = knob(16_384, 1, _MAX_NUMBER)
    cache_mb: int = knob(0, 0, _MAX_NUMBER)
    leak_mb: int = knob(0, 0, _MAX_NUMBER)
    copy_delay_ms: int = knob(0, 0, _MAX_NUMBER)
    oom: int = knob(0, 0, _MAX_NUMBER)
    lose: int = knob(0, 0, _MAX_NUMBER)
    others_mb: int = knob(0, 0, _MAX_NUMBER)
    model_mb: int = knob(0, 0, _MAX_NUMBER)
    load_ms: int = knob(0, 0, _MAX_NUMBER)
    graphs: int = knob(0, 0, 1)
    sick: int = knob(-1, 0, _MAX_DEVICES - 1)
    decode: int = knob(0, 0, 1)
    decode_off: int = knob(1, 0, 255)
    decode_error: int = knob(0, 0, _MAX_NUMBER)
    fault: str = ""
    lacks: tuple[str, ...] = ()


def device_types() -> tuple[str, ...]:
    """Return the device types that can be simulated: not part of torch, and with a sample in their row."""
    import backends.registry  # noqa: F401 - It registers the rows of other packages.

    return tuple(row.device_type for row in vendors.known() if row.sample)


def row_of(device_type: str) -> Facts:
    """Return the row of a device type that can be simulated. Raises StopIteration for another."""
    return next(row for row in vendors.of_type(device_type) if row.sample)


def parse(text: str) -> Simulation:
    """Parse `npu:2,memory_mb=1024,cache_mb=8,lacks=aten::silu`. Raises BackendUnavailableError with one sentence."""
    first, *parts = (part.strip() for part in text.split(",") if part.strip())
    device_type, colon, count = first.partition(":")
    if device_type not in device_types():
        raise _wrong(text, f"{device_type!r} is none of {', '.join(device_types())}")
    known, settings, lacks = knobs(Simulation), dict[str, Any](), list[str]()
    for part in (f"devices={count}", *parts) if colon else parts:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name == "lacks" and "::" in value:
            lacks.append(value)
        elif name == "fault" and value in RECORDED:
            settings["fault"] = value
        elif equals and name in known:
            try:
                settings[name] = value_of(known[name], value)
            except ValueError as error:
                raise _wrong(text, f"of {part!r}, {error}") from None
        else:
            raise _wrong(
                text,
                f"{part!r} is no setting: there are {', '.join(known)} (numbers), fault ({', '.join(RECORDED)}) "
                "and lacks (an operator, such as aten::silu)",
            )
    return Simulation(device_type, lacks=tuple(lacks), **settings)


def _wrong(text: str, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(f"The simulation {text!r} cannot be read: {reason}.")
