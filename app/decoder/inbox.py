"""The memory in which a decoder finds its images: a page of state, and buffers of bytes.

Owns: the layout. The server writes into a free buffer and names it in a job; the decoder says in the first
page which job it works on, so that the server knows the culprit should it die. Must not know what an image is.
"""

from __future__ import annotations

import mmap
import os

from app.processes.arena import sealed_memory

_STATE_BYTES = 4096
_KEPT_BYTES = 1 << 20  # Of a buffer; the rest goes back to the system once it is not used.


class Inbox:
    """Shared memory (memfd) of one decoder. The system gives memory when a buffer is first used."""

    def __init__(self, buffers: int, buffer_bytes: int, descriptor: int | None = None) -> None:
        """`descriptor`: of an inbox that another process has made; it stays the caller's."""
        self.buffer_bytes = -(-buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._own = descriptor is None
        size = _STATE_BYTES + buffers * self.buffer_bytes
        self.descriptor = sealed_memory("anychip-inbox", size) if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, size)
        self._view = memoryview(self._memory)
        self._working_on = self._view[:4].cast("I")

    @property
    def working_on(self) -> int | None:
        """The job that the decoder has begun and not ended."""
        number = self._working_on[0]
        return number - 1 if number else None

    def begin(self, token: int) -> None:
        """In the decoder: work on this job begins."""
        self._working_on[0] = token + 1

    def end(self) -> None:
        """In the decoder: no job is worked on."""
        self._working_on[0] = 0

    def write(self, buffer: int, data: bytes | bytearray | memoryview, tail: bytes = b"") -> None:
        """Copy an image's bytes into a buffer, which has room for them, and `tail` after them."""
        start = _STATE_BYTES + buffer * self.buffer_bytes
        end = start + len(data)
        self._view[start:end] = data
        self._view[end : end + len(tail)] = tail

    def buffer(self, buffer: int, size: int) -> memoryview:
        """The first `size` bytes of a buffer."""
        start = _STATE_BYTES + buffer * self.buffer_bytes
        return self._view[start : start + min(size, self.buffer_bytes)]

    def trim(self, buffer: int, used: int) -> None:
        """Give back what a large image took of a buffer; `used`: its size in bytes."""
        if used > _KEPT_BYTES:
            start = _STATE_BYTES + buffer * self.buffer_bytes + _KEPT_BYTES
            length = -(-(used - _KEPT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_REMOVE, start, min(length, self.buffer_bytes - _KEPT_BYTES))

    def close(self) -> None:
        """Give the descriptor back; the memory goes with it. Idempotent."""
        if self._own:
            self._own = False
            self._working_on.release()
            self._view.release()
            self._memory.close()
            os.close(self.descriptor)
