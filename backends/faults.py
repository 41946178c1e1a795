"""What runtimes raise, translated once into the contract's errors.

Owns: the words by which a fault is known that every runtime uses, and the translation. A vendor's own words are in its
row (backends.vendors). Must not know engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backends import vendors
from backends.backend import BackendError, DeviceLostError, OutOfDeviceMemoryError

# How allocators say it: PyTorch on a CPU, oneDNN, the C++ library, PyTorch on a device, others' constants.
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "bad_alloc", "out of memory", "out_of_memory")
_LINE = 200


@contextmanager
def translated_errors(device: str) -> Iterator[None]:
    """Turn what a runtime raises into the contract's errors. `device`: PyTorch's name of it, such as `npu:0`.

    Raises OutOfDeviceMemoryError, DeviceLostError, BackendError; what is neither MemoryError nor RuntimeError passes.
    """
    try:
        yield
    except MemoryError as error:
        raise OutOfDeviceMemoryError(f"{device} has too little memory.") from error
    except RuntimeError as error:
        rows = vendors.of_type(device.partition(":")[0])
        reason, said = first_line(error), str(error).lower()
        remedies = (remedy for row in rows for part, remedy in row.remedies.items() if part.lower() in said)
        remedy = next((f" ({text})" for text in remedies), "")
        if any(phrase in said for phrase in (*_OUT_OF_MEMORY, *(text for row in rows for text in row.out_of_memory))):
            raise OutOfDeviceMemoryError(f"{device} has too little memory: {reason}{remedy}") from error
        if any(phrase in said for row in rows for phrase in row.lost):
            raise DeviceLostError(f"{device} is lost: {reason}{remedy}") from error
        raise BackendError(f"{device} failed: {reason}{remedy}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says anything, at most 200 characters."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:_LINE]
