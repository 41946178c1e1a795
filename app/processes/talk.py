"""A channel on an event loop: the messages of one turn go in one packet, and received ones are handed on one by one.

Owns: reading, writing, and the end of both. Must not know what is said: both ends name the type of what they hear.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from app import clock
from app.pace import Pace
from app.processes.channel import Channel, ChannelError, reader, to_packet

log = logging.getLogger("anychip.talk")

_PACKET_BYTES = 1 << 20
"""Size of a turn's messages from which they are sent at once."""
_LAST_PACKETS = 256
_LEAST_BYTES = 256
"""Least size that a message counts as: to handle it costs as much."""


class Talk:
    """One end of a channel, inside a running event loop. `ended`: a future with the reason of the end; `error`: the
    breach of the rules that ended it, None if one of the two ends has just ended.
    """

    def __init__(
        self,
        channel: Channel,
        heard: Any,
        handle: Callable[[Any], None],
        early: Sequence[bytes] = (),
        *,
        name: str = "",
        most_bytes_per_s: float = math.inf,
        asked: tuple[type, ...] = (),
    ) -> None:
        """Begin to read. `heard`: type of the other end's messages; `handle` gets each, and its errors end the talk.

        `early`: packets that have come already; `name`: of the other end, for the log. `most_bytes_per_s`: limit of
        what it may say, except for answers to what it was `asked`; twice that at once.
        """
        self._name, self._asked = name, asked
        self._most = most_bytes_per_s
        self._pace = Pace(60 * most_bytes_per_s, 2 * most_bytes_per_s) if math.isfinite(most_bytes_per_s) else None
        self._channel = channel
        self._handle = handle
        self._decode = reader(heard)
        self._out: list[Any] = []
        self._out_bytes = 0
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.error: Exception | None = None
        self._loop.add_reader(self._channel.fileno(), self._readable)
        if early:
            self._loop.call_soon(self._take, early)

    def say(self, message: Any, size: int = 0, descriptor: int = -1) -> None:
        """Send a message at the end of this turn, of about so many bytes; with a descriptor, which is closed, now."""
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out.append(message)
        self._out_bytes += size
        if descriptor >= 0 or self._out_bytes > _PACKET_BYTES:
            self.flush(descriptor)

    def flush(self, *descriptors: int) -> None:
        """Send what was said."""
        out, self._out, self._out_bytes = self._out, [], 0
        descriptors = tuple(each for each in descriptors if each >= 0)
        if self.ended.done():
            for each in descriptors:
                os.close(each)
        elif out:
            try:
                with contextlib.suppress(OSError):  # The other end is gone: its last messages are still to be read.
                    self._channel.send(to_packet(out), descriptors)
            except ChannelError as error:
                self.end(str(error), error)
            else:
                if self._channel.waiting or self._writing:
                    self._wait_for_room()

    def take_descriptor(self) -> int:
        """Take the next descriptor that came; the caller's to close. Raises ChannelError."""
        return self._channel.take_descriptor()

    def end(self, reason: str, error: Exception | None = None) -> None:
        """End the talk: nothing is heard or said any more. Idempotent."""
        if not self.ended.done():
            self.error = error
            self.ended.set_result(reason)
            self._loop.remove_reader(self._channel.fileno())
            if self._writing:
                self._loop.remove_writer(self._channel.fileno())
            self._channel.close()

    def last_words(self) -> list[Any]:
        """Return what an end that is gone has said and nobody has heard."""
        words: list[Any] = []
        with contextlib.suppress(EOFError, OSError, ValueError, ChannelError):
            for _ in range(_LAST_PACKETS if not self.ended.done() else 0):
                for packet in self._channel.receive():
                    words += self._decode(packet)
        return words

    def _readable(self) -> None:
        self._take(None)

    def _take(self, packets: Sequence[bytes] | None) -> None:
        """Handle these packets, or those that have arrived."""
        try:
            for packet in self._channel.receive() if packets is None else packets:
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
        """Count the size of what was heard. Raises ChannelError for a flood."""
        assert self._pace is not None
        if self._pace.wait_s(clock.monotonic(), size):
            raise ChannelError(f"it said more than {self._most:g} bytes a second")
        self._pace.take(size)

    def _wait_for_room(self) -> None:
        """Have the loop write on while something waits."""
        self._writing = bool(self._channel.waiting)
        if self._writing:
            self._loop.add_writer(self._channel.fileno(), self._writable)
        else:
            self._loop.remove_writer(self._channel.fileno())

    def _writable(self) -> None:
        with contextlib.suppress(OSError):  # The other end is gone: its last messages are still to be read.
            self._channel.flush()
        self._wait_for_room()
