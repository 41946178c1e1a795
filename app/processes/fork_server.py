"""A fork server as the event loop sees it: the process that forks others, and its successor whenever it is gone.

Nothing here blocks: a fork server is asked for few children, and says little. A forked child is this process's own
child (forking): a fork server that ends, hangs or is stopped costs none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from anychip_base.interpreter import python_command
from app import clock
from app.processes.breaker import BACKOFF_S
from app.processes.forking import FORKED, NOT_FORKED, READY, REQUEST, event_in
from app.processes.packing import write_packed
from app.processes.place import Child, ChildStatus, SupervisedChild, Supervisor

log = logging.getLogger("anychip.workers")

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_ANSWER_S, _IMPORT_S = 5.0, 120.0
"""Silence after which a fork server is ended: one that is asked, which takes milliseconds, and one that imports."""
_MOST_FAILURES = 3
_SPAWNED = "from app.processes.forking import run_spawned; run_spawned()"


class Begun(NamedTuple):
    """A fork server's process id, and our end of the socket to it."""

    pid: int
    control: socket.socket

    def end(self) -> None:
        """End a fork server that no event loop has."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class _Forker(SupervisedChild):
    """One process that forks. `forks`: callers that wait for a child, by the number of the request."""

    end_s, kill_s = 0.0, BACKOFF_S[-1]

    def __init__(self, begin: Callable[[], Begun]) -> None:
        super().__init__("the process that forks")
        self.start_s = _IMPORT_S
        self.forks: dict[int, asyncio.Future[Child]] = {}
        self._begin = begin
        self._control: socket.socket | None = None
        self._between = 0

    async def begin(self) -> None:
        beginning = asyncio.ensure_future(asyncio.to_thread(self._begin))
        try:
            begun = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                (await beginning).end()
            raise
        self._control = begun.control
        self.process = Child(begun.pid)
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._readable)

    def disconnect(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control.fileno())
            control.close()
        between, self._between = self._between, 0
        if between:
            Child(between)  # The fork server may have ended before it reaped that one.
        for number in list(self.forks):
            self.settle(number, ConnectionResetError(f"the process that forks is gone: {self.over.result()}"))

    def answer_s(self) -> float:
        return _ANSWER_S

    def look(self) -> None:
        with contextlib.suppress(ConnectionError):
            self.send(0)

    def send(self, number: int, descriptors: tuple[int, ...] = (), *, fresh: bool = False) -> None:
        try:
            if self._control is None:
                raise ConnectionResetError("the process that forks has ended")
            socket.send_fds(self._control, [REQUEST.pack(number, fresh)], descriptors)
        except BlockingIOError:
            pass  # It does not read: a later look finds it silent.
        except OSError as error:
            self.end(f"it takes no requests: {error}")
            raise ConnectionResetError(str(error)) from None

    def settle(self, number: int, outcome: Child | Exception) -> None:
        waiting = self.forks.pop(number, None)
        if waiting is None:
            return
        _adopt(-1)
        if isinstance(outcome, Child):
            waiting.set_result(outcome)
        else:
            waiting.set_exception(outcome)
            waiting.exception()  # Marks it as seen, in case no task waits any more.

    def _readable(self) -> None:
        assert self._control is not None
        try:
            packet = self._control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self.end("its socket is closed")
            return
        event = event_in(packet)
        self._between = event.between
        if event.kind != READY or not self.forks:
            self.received_s = clock.monotonic()
        if event.kind == FORKED:
            self.has_served = True
            # A child that no task waits for finds its socket closed, ends, and is reaped all the same.
            self.settle(event.number, Child(event.value))
        elif event.kind == NOT_FORKED:
            self.settle(event.number, OSError(event.value, os.strerror(event.value)))
        elif self.status is ChildStatus.STARTING:
            self.move(ChildStatus.READY)


class ForkServer:
    """A fork server, made, used and stopped inside one running event loop. It restarts its process when needed."""

    def __init__(self, begin: Callable[[], Begun]) -> None:
        """Start soon. `begin`: starts a process; it is called in a thread, and may raise OSError."""
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._place = Supervisor(lambda: _Forker(begin), log)

    @property
    def pid(self) -> int | None:
        """The process's id; None if it has not begun yet."""
        return self._place.child.pid

    @property
    def ready(self) -> bool:
        """True if it forks at once."""
        return self._place.child.is_ready

    async def fork(self, *descriptors: int, fresh: bool = False) -> Child:
        """Fork a child, which gets these descriptors; `fresh`: with a new interpreter.

        A fork that fails is tried again, after pauses, until the caller is cancelled; if the fork server ends, the next
        one forks. Raises ConnectionError if one was never ready, or several in a row have forked nothing.
        """
        pauses_s = itertools.chain(BACKOFF_S[1:], itertools.repeat(BACKOFF_S[-1]))
        while True:
            forker = await asyncio.shield(self._place.ready)
            number = next(self._numbers)
            child = forker.forks[number] = self._loop.create_future()
            _adopt(+1)
            try:
                forker.send(number, descriptors, fresh=fresh)
                return await asyncio.shield(child)
            except ConnectionError as error:  # Nothing was forked: an earlier fork is reported before the end.
                forker.settle(number, error)
                if self._place.is_closed or self._place.breaker.in_a_row >= _MOST_FAILURES:
                    raise
            except OSError as error:
                pause_s = next(pauses_s)
                log.error("no process can be forked; it is tried again in %g s: %s", pause_s, error)
                await asyncio.sleep(pause_s)

    async def stop(self) -> None:
        """End the process. Idempotent."""
        await self._place.stop()


def prepare(libraries: Sequence[str], bare: str, environment: Mapping[str, str], *mains: str) -> None:
    """Start an interpreter in `environment`; it becomes the fork server `bare`, which has nothing of this process.

    Before that it calls the functions `libraries`, which import, and forks a fork server for each of `mains`: they
    share the libraries, and have this process's environment. All names are "module:function". `begin` then gives them.
    The caller calls `discard_prepared` in the end. Raises OSError.
    """
    written = write_packed(dict(os.environb), "anychip-environment")
    try:
        _prepared[bare], *others = _spawned((bare, *mains), environment, libraries)
        _adopt(len(mains))
        for main, each in zip(mains, others, strict=True):
            _prepared[main] = each
            socket.send_fds(each.control, [b"environment"], [written])
    finally:
        os.close(written)


_prepared: dict[str, Begun] = {}
"""Prepared fork servers. The process id is 0 until known if another fork server forks this one."""


def is_prepared(main: str) -> bool:
    """Return True if such a fork server waits for `begin`."""
    return main in _prepared


def discard_prepared(main: str) -> None:
    """End the fork server that no event loop has taken, if there is one."""
    if main in _prepared:
        with contextlib.suppress(OSError):  # It does not run yet, and will find its socket closed.
            _prepared[main].control.setblocking(False)
            begin(main).end()
        if main in _prepared:
            _prepared.pop(main).control.close()


def begin(main: str, environment: Mapping[str, str] | None = None) -> Begun:
    """Return the prepared fork server, or start an interpreter that runs `main` with its socket and this process's id.

    `environment`: of a fresh interpreter, None: this process's. For a thread: on a busy machine it takes a tenth of a
    second and more. Raises OSError.
    """
    if main in _prepared:
        begun = _prepared[main]
        if not begun.pid:
            packet = begun.control.recv(64)
            _adopt(-1)
            if not packet:
                del _prepared[main]
                raise ConnectionResetError("the process that was to fork it has ended")
            begun = begun._replace(pid=event_in(packet).value)
        del _prepared[main]
        return begun
    return _spawned((main,), dict(os.environ) if environment is None else environment)[0]


def _spawned(mains: Sequence[str], environment: Mapping[str, str], libraries: Sequence[str] = ()) -> list[Begun]:
    """Start an interpreter that becomes the first fork server, and forks the others. Raises OSError."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in mains]
    ends = [theirs for _, theirs in pairs]
    named = [f"{main}={end.fileno()}" for main, end in zip(mains, ends, strict=True)]
    command = python_command("-c", _SPAWNED, str(os.getpid()), ",".join(libraries), *named)
    try:
        pid = start(command, environment, *ends)
    except BaseException:
        for ours, _ in pairs:
            ours.close()
        raise
    finally:
        for theirs in ends:
            theirs.close()
    return [Begun(0 if number else pid, ours) for number, (ours, _) in enumerate(pairs)]


def start(command: Sequence[str], environment: Mapping[str, str], *ends: socket.socket) -> int:
    """Start a program in an `environment`, which inherits the sockets `ends`; return its process id.

    Like os.posix_spawn, which holds the interpreter's lock until the new program runs; this releases it meanwhile.
    Raises OSError.
    """
    for end in ends:
        end.set_inheritable(True)
    words = (ctypes.c_char_p * (len(command) + 1))(*map(os.fsencode, command), None)
    variables = [os.fsencode(f"{name}={text}") for name, text in environment.items()]
    described = (ctypes.c_char_p * (len(variables) + 1))(*variables, None)
    pid = ctypes.c_int()
    if error := ctypes.CDLL(None).posix_spawn(ctypes.byref(pid), words[0], None, None, words, described):
        raise OSError(error, os.strerror(error))
    return pid.value


_adopting = 0


def _adopt(more: int) -> None:
    """Make orphans below this process its children while a child is awaited.

    Not longer: processes that a worker's compiler has started and left must not become its children.
    """
    global _adopting  # noqa: PLW0603
    _adopting += more
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(_adopting > 0))
