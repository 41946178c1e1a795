"""Behaviour of devices that are not there: `ANYCHIP_NULL` (docs/null.md) and `ANYCHIP_SIMULATE` (docs/simulation.md).

Owns: the grammar of both, the range of each number, which batch triggers a fault, and vendors' recorded error messages.
Must not do anything itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, cast, get_args

import numpy as np

from backends.contract.backend import Pixels
from backends.contract.errors import BackendUnavailableError
from backends.vendors import table as vendors
from backends.vendors.table import Facts

FaultKind = Literal["fail", "crash", "hang", "freeze", "oom", "nan"]

_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
_TOLERANCE = 8  # Levels a channel: JPEG does not keep colours exactly.
_TRIGGER = re.compile(r"(?P<sign>[*>]?)(?P<number>[1-9][0-9]{0,8})|#(?P<colour>[0-9a-fA-F]{6})")
_HOUR_MS = 3_600_000
_TIB_MB = 1 << 20
_GIB_MB = 1 << 10
_MAX_DEVICES = 8  # the same in csrc/device.cpp
_MAX_NUMBER = 1 << 20

RECORDED = {
    # vllm-ascend#2210: CANN 8.2 beside numpy 2.
    "set_device": (
        "SetPrecisionMode:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:155 NPU function error: "
        "at_npu::native::AclSetCompileopt(aclCompileOpt::ACL_PRECISION_MODE, precision_mode), error code is 500001\n"
        "[ERROR] ERR00100 PTA call acl api failed"
    ),
    # vllm-ascend#3960; the words are in torch_npu 2.12.0's library.
    "graph": (
        "Cannot run aclop operators during NPU graph capture. Current working aclop is Fill. If you need this call to "
        "be captured, please try to set torch.npu.config.allow_internal_format = False."
    ),
    # pytorch#159728, on Intel's client GPUs.
    "mem_get_info": (
        "The device (Intel(R) Graphics [0x64a0]) doesn't support querying the available free memory. You can file an "
        "issue at https://github.com/pytorch/pytorch/issues to help us prioritize its implementation."
    ),
}
"""Messages, by the function of the device's module that raises them as a RuntimeError."""


def _knob(default: float, least: float, most: float) -> Any:
    """Declare a field from `least` to `most`; it takes whole numbers if its default is an int."""
    return field(default=default, metadata={"range": (least, most)})


def knobs(kind: Any) -> Mapping[str, Field[Any]]:
    """Return the numbers that may be given as `name=value` for a dataclass, by name."""
    return {each.name: each for each in fields(kind) if "range" in each.metadata}


def _value_of(knob: Field[Any], text: str) -> float:
    whole, (least, most) = isinstance(knob.default, int), knob.metadata["range"]
    found = re.fullmatch(r"[0-9]+" if whole else r"[0-9]+(\.[0-9]*)?", text)
    if not found or not least <= float(text) <= most:
        raise ValueError(f"it takes a {'whole ' if whole else ''}number from {least} to {most}")
    return int(text) if whole else float(text)


@dataclass(frozen=True)
class Fault:
    """Fault of the `number`-th batch (``), of every `number`-th (`*`), of larger ones (`>`), or of a `colour` (`#`)."""

    kind: FaultKind
    sign: Literal["", "*", ">", "#"]
    number: int = 0
    colour: tuple[int, int, int] = (0, 0, 0)

    def rows(self, pixels: Pixels, counted: int) -> list[int]:
        """Return the rows of uint8 [n, height, width, 3] that it hits; all rows if it hits whole batches.

        `counted`: number of batches so far, this one included.
        """
        if self.sign == "#":
            middle = pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2].astype(np.int16)
            close = np.flatnonzero((np.abs(middle - self.colour) <= _TOLERANCE).all(axis=1))
            # A row without an image is all zero. It is no black image.
            return [int(row) for row in close if pixels[row].any()]
        if self.sign == ">":
            pulled = len(pixels) > self.number
        else:
            pulled = counted % self.number == 0 if self.sign == "*" else counted == self.number
        return list(range(len(pixels))) if pulled else []


@dataclass(frozen=True)
class Behaviour:
    """Behaviour of a null device. Delays in milliseconds, memory in MiB, power in watts (0: no telemetry); `sick`: the
    telemetry is all bad. Of several faults the first that is triggered acts. `depth`: limit of batches in flight;
    `probes_mb`: data sent to a worker beside its models; `output_mb`: size of an image's first answer; `import_ms`:
    time of a worker's import.
    """

    devices: int = _knob(1, 1, 64)
    delay_ms: float = _knob(0.0, 0, _HOUR_MS)
    image_delay_ms: float = _knob(0.0, 0, _HOUR_MS)
    load_ms: float = _knob(0.0, 0, _HOUR_MS)
    memory_mb: int = _knob(1024, 1, _TIB_MB)
    leak_mb: int = _knob(0, 0, _TIB_MB)
    cache_mb: int = _knob(0, 0, _TIB_MB)
    power_w: float = _knob(0.0, 0, 100_000)
    sick: int = _knob(0, 0, 1)
    depth: int = _knob(1, 1, 2)
    probes_mb: int = _knob(0, 0, _GIB_MB)
    output_mb: int = _knob(0, 0, _GIB_MB)
    import_ms: float = _knob(0.0, 0, _HOUR_MS)
    faults: tuple[Fault, ...] = ()

    @property
    def reads_pixels(self) -> bool:
        """True if the device must see images: to count batches, and to find colours."""
        return bool(self.faults or self.leak_mb or self.cache_mb)


def parse_null(text: str) -> Behaviour:
    """Parse `delay_ms=5,crash=*100`. Raises BackendUnavailableError, which names the invalid part."""
    known, settings = knobs(Behaviour), dict[str, Any]()
    faults: list[Fault] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        try:
            if key in _KINDS:
                faults.append(_fault(key, value))
            elif key in settings:
                raise ValueError("it is given twice")
            elif key in known:
                settings[key] = _value_of(known[key], value)
            else:
                raise ValueError(f"it knows {', '.join((*known, *_KINDS))}")
        except ValueError as error:
            raise BackendUnavailableError(
                f"The null device does not understand {part!r}: {error} (docs/null.md)."
            ) from None
    return Behaviour(**settings, faults=tuple(faults))


def _fault(kind: FaultKind, text: str) -> Fault:
    found = _TRIGGER.fullmatch(text)
    if not found:
        raise ValueError("a fault takes 3 (third batch), *7 (every seventh), >4 (larger ones) or #ff0000 (a colour)")
    if found["colour"]:
        red, green, blue = bytes.fromhex(found["colour"])
        return Fault(kind, "#", colour=(red, green, blue))
    return Fault(kind, cast(Literal["", "*", ">"], found["sign"]), int(found["number"]))


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
    devices: int = _knob(1, 1, _MAX_DEVICES)
    memory_mb: int = _knob(16_384, 1, _MAX_NUMBER)
    cache_mb: int = _knob(0, 0, _MAX_NUMBER)
    leak_mb: int = _knob(0, 0, _MAX_NUMBER)
    copy_delay_ms: int = _knob(0, 0, _MAX_NUMBER)
    oom: int = _knob(0, 0, _MAX_NUMBER)
    lose: int = _knob(0, 0, _MAX_NUMBER)
    others_mb: int = _knob(0, 0, _MAX_NUMBER)
    model_mb: int = _knob(0, 0, _MAX_NUMBER)
    load_ms: int = _knob(0, 0, _MAX_NUMBER)
    graphs: int = _knob(0, 0, 1)
    sick: int = _knob(-1, 0, _MAX_DEVICES - 1)
    decode: int = _knob(0, 0, 1)
    decode_off: int = _knob(1, 0, 255)
    decode_error: int = _knob(0, 0, _MAX_NUMBER)
    fault: str = ""
    lacks: tuple[str, ...] = ()


def device_types() -> tuple[str, ...]:
    """Return the device types that can be simulated: not part of torch, and with a sample in their row."""
    import backends.registry  # noqa: F401 - It registers the rows of other packages.

    return tuple(row.device_type for row in vendors.known() if row.sample)


def row_of(device_type: str) -> Facts:
    """Return the row of a device type that can be simulated. Raises StopIteration for another."""
    return next(row for row in vendors.of_type(device_type) if row.sample)


def parse_simulation(text: str) -> Simulation:
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
                settings[name] = _value_of(known[name], value)
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
