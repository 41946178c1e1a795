"""One end of a socket pair between the server and a child: whole packets, and neither end ever waits for the other.

A packet is four bytes of length and a MessagePack list of messages; descriptors travel with it. Nothing here blocks:
what the socket does not take at once waits, up to a limit. Talk is an end on an event loop.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from app import clock
from app.pace import Pace

log = logging.getLogger("anychip.talk")

MAX_MESSAGE_BYTES = 4 << 20
"""Longest message; both ends refuse longer ones: large data travels in shared memory."""
MAX_WAITING_BYTES = 8 << 20
"""Most bytes that may wait until the other end reads, the cost of keeping them included."""
_KEEPING_BYTES = 256
"""Cost of a waiting message beside its bytes: many small ones shall cost no more than few large ones."""
_PACKET_BYTES = 1 << 20
"""Size of a turn's messages from which they are sent at once."""
_LEAST_BYTES = 256
"""Least size that a message counts as: to handle it costs as much."""
_HEADER = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8
_CLOSE_ON_EXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)  # Enumerations cost a microsecond.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)


class ChannelError(Exception):
    """Breach of the rules by the other end; the message is one sentence without a full stop."""


class NotReadError(ChannelError):
    """Too much waits until the other end reads."""


class DescriptorLostError(ChannelError):
    """Loss of a descriptor that came while this process may have no more of them: the system has closed it."""


_LOST = -1


def reader(kind: Any) -> Callable[[bytes | memoryview], list[Any]]:
    """Return a function that decodes packets of messages of this type. It raises ValueError for any others."""
    return msgspec.msgpack.Decoder(list[kind]).decode


to_packet: Callable[[Sequence[Any]], bytes] = msgspec.msgpack.Encoder(enc_hook=lambda value: value.item()).encode
"""Function that encodes messages for `reader` at the other end."""


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
            close_all(descriptors)
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
            close_all(descriptors)
            descriptors.clear()
            self._waiting_bytes -= sent
            if sent == len(frame):
                self.waiting.popleft()
                self._waiting_bytes -= _KEEPING_BYTES
            else:
                self.waiting[0] = (frame[sent:], descriptors)

    def flush_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write what waits now, and what the socket does not take later in `loop`."""
        with contextlib.suppress(OSError):  # The other end is gone: its last messages are still to be read.
            self.flush()
        if self.waiting:
            loop.add_writer(self.fileno(), self.flush_in, loop)
        else:
            loop.remove_writer(self.fileno())

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived whole; none if none has.

        Raises EOFError at the end, ConnectionError, ChannelError.
        """
        try:
            size, ancillary, flags, _ = self._socket.recvmsg_into((self._chunk,), _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
        except BlockingIOError:
            return []
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array.array("i", content[: len(content) // 4 * 4]))
        if flags & _TRUNCATED and not ancillary:
            self._descriptors.append(_LOST)  # One came: a process without room for one gets none.
        elif flags & _TRUNCATED or len(self._descriptors) > _MAX_DESCRIPTORS:
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
        close_all(self._descriptors)
        self._descriptors.clear()
        for _, descriptors in self.waiting:
            close_all(descriptors)
        self.waiting.clear()
        self._waiting_bytes = 0
        self._socket.close()


class Talk:
    """One end of a channel, inside a running event loop. `ended`: a future with the reason of the end; `error`: the
    breach of the rules that ended it, None if one of the two ends has just ended.
    """

    def __init__(
        self,
        channel: Channel,
        kind: Any,
        handle: Callable[[Any], None],
        early: Sequence[bytes] = (),
        *,
        name: str = "",
        most_bytes_per_s: float = math.inf,
        asked: tuple[type, ...] = (),
    ) -> None:
        """Begin to read. `kind`: type of the other end's messages; `handle` gets each, and its errors end the talk.

        `early`: packets that have come already; `name`: of the other end, for the log. `most_bytes_per_s`: limit of
        what it may say, except for answers to what it was `asked`; twice that at once.
        """
        self._name, self._asked = name, asked
        self._most = most_bytes_per_s
        self._pace = Pace(60 * most_bytes_per_s, 2 * most_bytes_per_s) if math.isfinite(most_bytes_per_s) else None
        self._channel, self.take_descriptor = channel, channel.take_descriptor
        self._handle = handle
        self._decode = reader(kind)
        self._out: list[Any] = []
        self._out_bytes = 0
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.error: Exception | None = None
        self._loop.add_reader(self._channel.fileno(), self._readable)
        channel.flush_in(self._loop)
        if early:
            self._loop.call_soon(self._readable, early)

    def say(self, message: Any, size: int = 0, descriptor: int = -1) -> None:
        """Send a message at the end of this turn, of about so many bytes; with a descriptor, which is closed, now."""
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out.append(message)
        self._out_bytes += size
        if descriptor >= 0 or self._out_bytes > _PACKET_BYTES:
            self.flush(descriptor)

    def flush(self, descriptor: int = -1) -> None:
        """Send what waits."""
        out, self._out, self._out_bytes = self._out, [], 0
        descriptors = (descriptor,) if descriptor >= 0 else ()
        if self.ended.done():
            close_all(descriptors)
        elif out:
            try:
                with contextlib.suppress(OSError):  # The other end is gone: its last messages are still to be read.
                    self._channel.send(to_packet(out), descriptors)
            except ChannelError as error:
                self.end(str(error), error)
            else:
                if self._channel.waiting:
                    self._channel.flush_in(self._loop)

    def end(self, reason: str, error: Exception | None = None) -> None:
        """End the talk: nothing is sent or received any more. Idempotent."""
        if not self.ended.done():
            self.error = error
            self.ended.set_result(reason)
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()

    def _readable(self, early: Sequence[bytes] = ()) -> None:
        try:
            for packet in early or self._channel.receive():
                messages = self._decode(packet)
                if self._pace is not None:
                    unasked = [each for each in messages if not isinstance(each, self._asked)]
                    if unasked or not messages:
                        self._count(max(len(packet), _LEAST_BYTES * len(messages)))
                for message in messages:
                    if self.ended.done():
                        return
                    self._handle(message)
        except (EOFError, ConnectionError):
            self.end("it ended")
        except Exception as error:  # Nothing that the other end says can be trusted any more.
            log.exception("%s: what came cannot be read", self._name)
            self.end(f"it said what cannot be read: {error}", error)

    def _count(self, size: int) -> None:
        assert self._pace is not None
        if self._pace.wait_s(clock.monotonic(), size):
            raise ChannelError(f"it said more than {self._most:g} bytes a second")
        self._pace.take(size)


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors, those that are open."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
