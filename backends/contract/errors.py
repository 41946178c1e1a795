"""Errors of the contract, and the translation of runtimes' errors into these. Must not know engines.

A vendor's own messages are in its row (backends.vendors.table).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from backends.vendors import table as vendors


class BackendError(Exception):
    """A fault of a chip or its software; the message is one plain sentence."""


class BackendUnavailableError(BackendError):
    """The hardware or its software is missing; the message says why, and the remedy."""


class EngineRefusedError(BackendError):
    """An engine cannot run this network at this precision here; the message says why."""


class NotConvertedError(EngineRefusedError):
    """A compiler's converter does not take the network, and the same one would not at the next start either."""


class WrongAnswersError(EngineRefusedError):
    """An engine runs the network, and its answers are not the network's; the message says by how much."""


class OutOfDeviceMemoryError(BackendError):
    """The device has too little memory for what was asked."""


class DeviceLostError(BackendError):
    """The device no longer answers; only ending the process that owns it helps."""


# Messages of allocators: PyTorch on a CPU, oneDNN, the C++ library, PyTorch on a device, others' constants.
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "bad_alloc", "out of memory", "out_of_memory")
_LINE = 200


@contextmanager
def translated_errors(device: str, silence: Callable[[], str] = str) -> Iterator[None]:
    """Translate a runtime's errors into the contract's. `device`: PyTorch's name of it, such as `npu:0`.

    `silence`: asked after an unknown error, returns why nothing computes there any more, "" if it does. Vendors word
    their faults as they like; the test that a device still answers is the same everywhere. Raises
    OutOfDeviceMemoryError, DeviceLostError, BackendError; errors other than MemoryError and RuntimeError pass.
    """
    try:
        yield
    except MemoryError as error:
        raise OutOfDeviceMemoryError(f"{device} has too little memory.") from error
    except RuntimeError as error:
        rows = vendors.of_type(device.partition(":")[0])
        reason, lower = first_line(error), str(error).lower()
        remedies = (remedy for row in rows for part, remedy in row.remedies.items() if part.lower() in lower)
        remedy = next((f" ({text})" for text in remedies), "")
        if any(phrase in lower for phrase in (*_OUT_OF_MEMORY, *(text for row in rows for text in row.out_of_memory))):
            raise OutOfDeviceMemoryError(f"{device} has too little memory: {reason}{remedy}") from error
        if any(phrase in lower for row in rows for phrase in row.lost):
            raise DeviceLostError(f"{device} is lost: {reason}{remedy}") from error
        failed = f"{device} failed: {reason}{remedy}"
        if silent := silence():
            raise DeviceLostError(f"{device} is lost: {failed} ({silent})") from error
        raise BackendError(failed) from error


def not_converted(what: str, *errors: Exception) -> EngineRefusedError:
    """Return the refusal for the errors of converters: NotConvertedError, unless the machine lacked memory or room."""
    causes: list[BaseException] = list(errors)
    for each in causes:  # It grows meanwhile.
        causes += [more for more in (each.__cause__, each.__context__) if more is not None and more not in causes]
    text = "\n".join(map(str, causes)).lower()
    scarce = any(isinstance(each, OSError | MemoryError) for each in causes)
    kind = EngineRefusedError if scarce or any(each in text for each in _OUT_OF_MEMORY) else NotConvertedError
    return kind(f"{what}: {'; '.join(map(first_line, errors))}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not empty, at most 200 characters."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:_LINE]
