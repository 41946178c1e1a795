"""A fork server as the event loop sees it: the process that forks others, and its successor whenever it is gone.

Owns: its process and socket, the callers that wait for a child, and the start of programs. Must not know what a child
does. Nothing here blocks: a fork server is asked for few children, and says little.

A forked child is this process's own child (forking): a fork server that ends, hangs or is stopped costs none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import pkgutil
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from anychip_base.interpreter import python_command
from app.processes.breaker import BACKOFF_S
from app.processes.forking import FORKED, NOT_FORKED, READY, event_in, forked, is_stopped, pack_request
from app.processes.place import Child

log = logging.getLogger("anychip.workers")

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LOOK_S = 1.0
_LOOKS = 5
"""Looks for which a fork server may be silent after a request; an answer takes milliseconds. They are counted instead
of seconds: of time in which this process itself stood still only one passes.
"""
_IMPORT_LOOKS = 120
_MOST_FAILURES = 3
_SPAWNED = "from app.processes.forking import run_spawned; run_spawned()"


class Begun(NamedTuple):
    """A fork server's process id, our end of the socket to it, and the environment that it was started in."""

    pid: int
    control: socket.socket
    environment: Mapping[str, str]

    def end(self) -> None:
        """End a fork server that no event loop has."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class ForkServer:
    """A fork server, made, used and stopped inside one running event loop. It restarts its process when needed."""

    def __init__(self, begin: Callable[[], Begun]) -> None:
        """Start soon. `begin`: starts a process; it is called in a thread, and may raise OSError."""
        self.environment: Mapping[str, str] = {}
        """Environment that the process was started in."""
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._forks: dict[int, asyncio.Future[Child]] = {}
        self._control: socket.socket | None = None
        self._process: Child | None = None
        self._between = 0
        self._failures = 0  # Ends in a row without a fork.
        self._silent = 0  # Looks without an answer.
        self._stopped = False
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._start_soon()

    @property
    def pid(self) -> int | None:
        """The process's id; None if none could be begun yet."""
        return self._process.pid if self._process is not None else None

    @property
    def ready(self) -> bool:
        """True if it forks at once."""
        return self._ready.done() and self._ready.exception() is None

    async def fork(self, *descriptors: int, fresh: bool = False) -> Child:
        """Fork a child, which gets these descriptors; `fresh`: with a new interpreter.

        A fork that fails is tried again, after pauses, until the caller is cancelled; if the fork server ends, the next
        one forks. Raises ConnectionError if one was never ready, or several in a row have forked nothing.
        """
        for pause_s in itertools.chain(BACKOFF_S[1:], itertools.repeat(BACKOFF_S[-1])):
            try:
                return await self._forked(descriptors, fresh=fresh)
            except ConnectionError:
                raise
            except OSError as error:
                log.error("no process can be forked; it is tried again in %g s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
        raise AssertionError

    async def _forked(self, descriptors: tuple[int, ...], *, fresh: bool) -> Child:
        """Fork a child. Raises OSError if it cannot be forked; ConnectionError."""
        while True:
            await asyncio.shield(self._ready)
            number = next(self._numbers)
            child = self._forks[number] = self._loop.create_future()
            _adopt(+1)
            try:
                self._send(number, descriptors, fresh=fresh)
                return await asyncio.shield(child)
            except ConnectionError as error:  # Nothing was forked: an earlier fork is reported before the end.
                self._settle(number, error)
                if self._stopped or self._failures >= _MOST_FAILURES:
                    raise

    async def stop(self) -> None:
        """End the process. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._end("it was stopped")
        await asyncio.wait((self._starting,))
        if self._process is not None:
            await self._process.ends_within(BACKOFF_S[-1])

    async def _start(self) -> None:
        self._between = self._silent = 0
        try:
            begun = await asyncio.to_thread(self._begin)
        except OSError as error:
            self._end(f"it could not be begun: {error}")
            return
        self._control, self.environment = begun.control, begun.environment
        self._process = Child(begun.pid)
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._readable)
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        if self._stopped:
            self._end("it was stopped")

    def _start_soon(self) -> None:
        self._starting = self._loop.create_task(self._start(), name="start of a fork server")

    def _look(self) -> None:
        """Look once a second whether it answers."""
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        self._silent += 1
        # It is silent while it imports, unless it has been stopped.
        patient = not self._ready.done() and self._silent <= _IMPORT_LOOKS
        if self._silent > _LOOKS and not (patient and not is_stopped(self.pid)):
            self._end("it does not answer")
        elif self._ready.done():
            with contextlib.suppress(ConnectionError):
                self._send(0)

    def _send(self, number: int, descriptors: tuple[int, ...] = (), *, fresh: bool = False) -> None:
        """Send a request. Raises ConnectionError."""
        try:
            if self._control is None:
                raise ConnectionResetError("the process that forks has ended")
            socket.send_fds(self._control, [pack_request(number, fresh=fresh)], descriptors)
        except BlockingIOError:
            pass  # It does not read: a later look finds it silent.
        except OSError as error:
            self._end(f"it takes no requests: {error}")
            raise ConnectionResetError(str(error)) from None

    def _readable(self) -> None:
        assert self._control is not None
        try:
            packet = self._control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._end("its socket is closed")
            return
        event = event_in(packet)
        self._between = event.between
        if event.kind != READY or not self._forks:
            self._silent = 0
        if event.kind == FORKED:
            self._failures = 0
            # A child that no task waits for finds its socket closed, ends, and is reaped all the same.
            self._settle(event.number, Child(event.value))
        elif event.kind == NOT_FORKED:
            self._settle(event.number, OSError(event.value, os.strerror(event.value)))
        elif not self._ready.done():
            self._ready.set_result(None)

    def _settle(self, number: int, outcome: Child | Exception) -> None:
        waiting = self._forks.pop(number, None)
        if waiting is None:
            return
        _adopt(-1)
        if isinstance(outcome, Child):
            waiting.set_result(outcome)
        else:
            waiting.set_exception(outcome)
            waiting.exception()  # Marks it as seen, in case no task waits any more.

    def _end(self, reason: str) -> None:
        """Give up the process, if there is one; start another unless stopped."""
        if self._timer is not None:
            self._timer.cancel()
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
        if self._between:
            Child(self._between)  # The fork server may have ended before it reaped that one.
        self._failures += 1
        gone = ConnectionResetError(f"the process that forks is gone: {reason}")
        if not self._ready.done():
            self._ready.set_exception(gone)
            self._ready.exception()  # Marks it as seen, in case no task waits.
        if not self._stopped:
            self._ready = self._loop.create_future()
        for number in list(self._forks):
            self._settle(number, gone)
        if not self._stopped:
            log.error("%s; another one is begun", gone)
            self._timer = self._loop.call_later(BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1], self._start_soon)


def prepare(libraries: Callable[[], None], *mains: str) -> None:
    """Fork a fork server for each of `mains` ("module:function"). They share what `libraries` imports; this process
    does not.

    For a process that has one thread and is about to make a service, which `begin` then gives them. The caller calls
    `discard_prepared` in the end.
    """
    if threading.active_count() > 1:
        return
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in mains]
    _adopt(len(mains) - 1)  # The first fork server forks all others.
    servers = [(theirs, pkgutil.resolve_name(main)) for main, (_, theirs) in zip(mains, pairs, strict=True)]
    pid = forked(libraries, *servers)
    for number, (main, (ours, theirs)) in enumerate(zip(mains, pairs, strict=True)):
        theirs.close()
        _prepared[main] = Begun(0 if number else pid, ours, dict(os.environ))


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


def prepare_bare(main: str, environment: Mapping[str, str]) -> None:
    """Start a fork server that has nothing of this process, in an `environment` of its own, for `begin` to take.

    The caller calls `discard_prepared` in the end. Raises OSError.
    """
    _prepared[main] = begin(main, environment)


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
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = dict(os.environ) if environment is None else environment
    command = python_command("-c", _SPAWNED, main, str(theirs.fileno()), str(os.getpid()))
    try:
        return Begun(start(command, theirs, environment), ours, environment)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


def start(command: Sequence[str], end: socket.socket, environment: Mapping[str, str]) -> int:
    """Start a program in an `environment`, which inherits `end`; return its process id.

    Like os.posix_spawn, which holds the interpreter's lock until the new program runs; this releases it meanwhile.
    Raises OSError.
    """
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
