"""One end of a socket pair between the server and a child: whole packets, and neither end ever waits for the other.

Owns: framing (four bytes of length, then a packet: a MessagePack list of messages), bytes that wait to be written, and
descriptors that travel with a packet. Must not know what a message says.

Nothing here blocks. Bytes that the socket does not take at once wait here, up to a limit; an incomplete message waits
for its rest. A frozen or broken other end therefore costs memory up to the limit, and never time.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 4 << 20
"""Longest message; both ends refuse longer ones: large data travels in shared memory."""
MAX_WAITING_BYTES = 8 << 20
"""Most bytes that may wait until the other end reads, the cost of keeping them included."""
_KEEPING_BYTES = 256
"""Cost of a waiting message beside its bytes: many small ones shall cost no more than few large ones."""
_HEADER = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)


class ChannelError(Exception):
    """Breach of the rules by the other end; the message is one sentence without a full stop."""


class NotReadError(ChannelError):
    """Too much waits until the other end reads."""


class DescriptorLostError(ChannelError):
    """Loss of a descriptor that came while this process may have no more of them: the system has closed it."""


_LOST = -1


def to_packet(messages: Sequence[Any]) -> bytes:
    """Encode messages for `reader` at the other end."""
    return _encode(messages)


def reader(kind: Any) -> Callable[[bytes], list[Any]]:
    """Return a function that decodes packets of messages of this type. It raises ValueError for any others."""
    return msgspec.msgpack.Decoder(list[kind]).decode


def _number(value: Any) -> Any:
    """Convert a number of NumPy's to Python's."""
    return value.item()


_encode = msgspec.msgpack.Encoder(enc_hook=_number).encode


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Make both ends. Raises OSError."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class Channel:
    """One end of a channel. Owned by one thread, or guarded by its owner."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._received = bytearray()
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._descriptors: deque[int] = deque()  # Received, and not yet taken.
        self.waiting: deque[tuple[memoryview, list[int]]] = deque()
        """Bytes that wait until the socket takes them: then `flush` is to be called."""
        self._waiting_bytes = 0

    def fileno(self) -> int:
        """Return the socket's descriptor, for an event loop."""
        return self._socket.fileno()

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message, now or when the socket takes it. The channel owns and closes `descriptors`.

        Raises ChannelError if too much waits already, OSError if the other end is gone.
        """
        frame = memoryview(_HEADER.pack(len(message)) + message)
        if len(message) > MAX_MESSAGE_BYTES or self._waiting_bytes + len(frame) + _KEEPING_BYTES > MAX_WAITING_BYTES:
            _close_all(descriptors)
            if len(message) > MAX_MESSAGE_BYTES:
                raise ChannelError(f"a message is too long: {len(message)} bytes")
            raise NotReadError(f"the other end does not read: {self._waiting_bytes} bytes wait")
        if not self.waiting and not descriptors:  # The usual case.
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                sent = 0
            if sent == len(frame):
                return
            frame = frame[sent:]
        first = not self.waiting
        self.waiting.append((frame, list(descriptors)))
        self._waiting_bytes += len(frame) + _KEEPING_BYTES
        if first:  # Else the socket is full: a try for each message would cost a system call each.
            self.flush()

    def flush(self) -> None:
        """Write as much of the waiting bytes as the socket takes. Raises OSError."""
        while self.waiting:
            frame, descriptors = self.waiting[0]
            try:
                sent = socket.send_fds(self._socket, [frame], descriptors) if descriptors else self._socket.send(frame)
            except BlockingIOError:
                return
            _close_all(descriptors)
            descriptors.clear()
            self._waiting_bytes -= sent
            if sent == len(frame):
                self.waiting.popleft()
                self._waiting_bytes -= _KEEPING_BYTES
            else:
                self.waiting[0] = (frame[sent:], descriptors)

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived whole; none if none has.

        Raises EOFError at the end, ConnectionError, ChannelError.
        """
        try:
            size, ancillary, flags, _ = self._socket.recvmsg_into(
                (self._chunk,), _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return []
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array.array("i", content[: len(content) // 4 * 4]))
        if flags & socket.MSG_CTRUNC and not ancillary:
            self._descriptors.append(_LOST)  # One came: a process without room for one gets none.
        elif flags & socket.MSG_CTRUNC or len(self._descriptors) > _MAX_DESCRIPTORS:
            raise ChannelError("too many descriptors came")
        if not size:
            raise EOFError
        if not self._received and size >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._chunk)
            if size == _HEADER.size + length:  # The usual case.
                return [bytes(self._chunk[_HEADER.size : size])]
        self._received += self._chunk[:size]
        messages = []
        start = 0
        while len(self._received) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._received, start)
            if length > MAX_MESSAGE_BYTES:
                raise ChannelError(f"a message of {length} bytes was announced")
            end = start + _HEADER.size + length
            if end > len(self._received):
                break
            messages.append(bytes(self._received[start + _HEADER.size : end]))
            start = end
        del self._received[:start]
        return messages

    def take_descriptor(self) -> int:
        """Take the next descriptor that came with the messages so far; the caller's to close.

        Raises ChannelError, DescriptorLostError.
        """
        if not self._descriptors:
            raise ChannelError("a descriptor is missing")
        descriptor = self._descriptors.popleft()
        if descriptor == _LOST:
            raise DescriptorLostError("a descriptor came, and no more files may be open here (ulimit -n)")
        return descriptor

    def wait(self, timeout_s: float | None) -> tuple[bool, bool]:
        """Wait, in a thread without an event loop, until there is something to receive, the socket takes more of the
        waiting bytes, or time is up. Return whether it can be read, and whether it can be written.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self.waiting else 0))
        for _, events in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3):
            return bool(events & ~select.POLLOUT), bool(events & select.POLLOUT)
        return False, False

    def close(self) -> None:
        """Close the socket and the descriptors that were not taken. Idempotent."""
        _close_all(self._descriptors)
        self._descriptors.clear()
        for _, descriptors in self.waiting:
            _close_all(descriptors)
        self.waiting.clear()
        self._waiting_bytes = 0
        self._socket.close()


def _close_all(descriptors: Sequence[int] | deque[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
