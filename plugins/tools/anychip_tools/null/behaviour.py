"""Behaviour of the null device: delays, memory, and faults on chosen batches.

Owns: the grammar of `ANYCHIP_NULL` (docs/null.md), and which batch triggers a fault. Must not do anything itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np

from anychip_tools.knobs import knob, knobs, value_of
from backends.contract.backend import Pixels
from backends.contract.errors import BackendUnavailableError

FaultKind = Literal["fail", "crash", "hang", "freeze", "oom", "nan"]

_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
_TOLERANCE = 8  # Levels a channel: JPEG does not keep colours exactly.
_TRIGGER = re.compile(r"(?P<sign>[*>]?)(?P<number>[1-9][0-9]{0,8})|#(?P<colour>[0-9a-fA-F]{6})")
_HOUR_MS = 3_600_000
_TIB_MB = 1 << 20
_GIB_MB = 1 << 10


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
    """Behaviour of a device. Delays in milliseconds, memory in MiB, power in watts (0: no telemetry); `sick`: the
    telemetry is all bad. Of several faults the first that is triggered acts. `depth`: limit of batches in flight;
    `probes_mb`: data sent to a worker beside its models; `output_mb`: size of an image's first answer; `import_ms`:
    time of a worker's import.
    """

    devices: int = knob(1, 1, 64)
    delay_ms: float = knob(0.0, 0, _HOUR_MS)
    image_delay_ms: float = knob(0.0, 0, _HOUR_MS)
    load_ms: float = knob(0.0, 0, _HOUR_MS)
    memory_mb: int = knob(1024, 1, _TIB_MB)
    leak_mb: int = knob(0, 0, _TIB_MB)
    cache_mb: int = knob(0, 0, _TIB_MB)
    power_w: float = knob(0.0, 0, 100_000)
    sick: int = knob(0, 0, 1)
    depth: int = knob(1, 1, 2)
    probes_mb: int = knob(0, 0, _GIB_MB)
    output_mb: int = knob(0, 0, _GIB_MB)
    import_ms: float = knob(0.0, 0, _HOUR_MS)
    faults: tuple[Fault, ...] = ()

    @property
    def reads_pixels(self) -> bool:
        """True if the device must see images: to count batches, and to find colours."""
        return bool(self.faults or self.leak_mb or self.cache_mb)


def parse(text: str) -> Behaviour:
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
                settings[key] = value_of(known[key], value)
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
