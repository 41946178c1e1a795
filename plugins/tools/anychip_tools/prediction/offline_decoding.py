"""Decoding of files into blocks of pixels, for `anychip predict` without `--url`.

    paths ─► Decoding.begin ─► decoders fill the rows of a block ─► Decoding.finish ─► DecodedFile of each

Owns: the memory of the blocks, and their decoders: threads of this process for a few images, processes for many.
Threads share the interpreter's lock, also with the thread that finishes answers: with small images two of them and
that thread spent a third of their time on passing the lock. Processes need seconds to start. Must not know devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anychip_base.interpreter import python_command
from app.arguments import CommandError
from app.decoder.decoder import decode_into
from app.images.header import ImageError, check_pixels, read_header
from app.processes.arena import Arena, Pool
from models import PixelModel, Placement

_STOP_TIMEOUT_S = 5.0
_PROGRESS_BYTES = 16
"""Bytes in which each process notes its block and its file in the block."""
_TAKEN_BYTES = 8
_FILES_TAKEN = 4
"""Files taken at a time: few, so that all processes end together; enough that the lock's time does not matter."""
_MAIN = "from anychip_tools.prediction import offline_decoding; offline_decoding.main()"


@dataclass(slots=True)
class DecodedFile:
    """Place of a file's image in the network's input, or why it cannot be read. `encoded`: the file, if wanted."""

    placement: Placement | None = None
    error: str = ""
    encoded: bytes | None = None


@dataclass(frozen=True)
class Decode:
    """Way to decode every file. `keeps_encoded`: keep the file's bytes, too."""

    model: PixelModel
    max_pixels: int
    keeps_encoded: bool

    def file(self, path: str, target: Tensor) -> DecodedFile:
        """Decode a file into its row of a batch, uint8 `model.input_shape`."""
        decoded = DecodedFile()
        try:
            with open(path, "rb", buffering=0) as file:
                encoded = file.readall()
            if self.keeps_encoded:
                decoded.encoded = encoded
            header = read_header(encoded)
            check_pixels(header, self.max_pixels)
            decoded.placement = decode_into(self.model, encoded, header, target)
        except ImageError as error:
            decoded.error = str(error)
        except OSError as error:
            decoded.error = error.strerror or str(error)
        return decoded

    def files(self, paths: Sequence[str], rows: Tensor) -> list[DecodedFile]:
        """Decode each file into the row at its place."""
        return [self.file(path, row) for path, row in zip(paths, rows, strict=False)]


class DecodingThreads:
    """Pool of `count` threads, ready at once, and `blocks` blocks of `block_size` images.

    `begin` starts to decode files into the first rows of a block; `finish` waits for the block that was begun first.
    The two may run in different threads. `pixels`: of each block, uint8 [block size, *input shape].
    """

    def __init__(self, decode: Decode, count: int, blocks: int, block_size: int) -> None:
        self._decode, self.count = decode, count
        shape = (block_size, *decode.model.input_shape)
        self.pixels = [torch.zeros(shape, dtype=torch.uint8) for _ in range(blocks)]
        self.threads = _threads(count)
        self._begun: deque[list[Future[list[DecodedFile]]]] = deque()

    def wait(self) -> None:
        """Return at once: threads are ready."""

    def begin(self, block: int, paths: Sequence[str]) -> None:
        """Submit one task a thread, not one an image: handing over a task costs time beside a small image."""
        size = -(-len(paths) // self.count)
        rows = self.pixels[block]
        firsts = range(0, len(paths), size)
        decode = self._decode.files
        self._begun.append([self.threads.submit(decode, paths[each : each + size], rows[each:]) for each in firsts])

    def finish(self) -> list[DecodedFile]:
        """Return the decoded files in the order of the paths."""
        return [image for part in self._begun.popleft() for image in part.result()]

    def close(self) -> None:
        """End the threads; those at work finish their part."""
        self.threads.shutdown(cancel_futures=True)


class _Begun(NamedTuple):
    """Block that is being decoded. `number`: counts all blocks, from 1 on."""

    number: int
    processes: int
    paths: list[str]


class DecodingProcesses:
    """Pool like DecodingThreads, of processes, ready after the seconds that PyTorch's import takes.

    All processes decode the same block; an idle one takes the next few files. With a fixed part
    for each, a process that shared its processor with another thread delayed the rest.
    """

    def __init__(self, decode: Decode, count: int, blocks: int, block_size: int) -> None:
        """Start the processes. Raises OSError."""
        self.count = count
        self._shape = (block_size, *decode.model.input_shape)
        self._arena = Arena([(math.prod(self._shape), blocks), (_PROGRESS_BYTES, count), (_TAKEN_BYTES, blocks)])
        self.pixels = _pixels(self._arena, self._shape)
        self._blocks = 0
        self._begun: deque[_Begun] = deque()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(count):
                ours, theirs = multiprocessing.Pipe()
                self._connections.append(ours)
                [memory] = self._arena.descriptors()
                given = theirs.fileno(), memory
                try:
                    # Not multiprocessing: its children can import modules of the current folder first.
                    process = subprocess.Popen(python_command("-c", _MAIN, *map(str, given)), pass_fds=given)
                finally:
                    theirs.close()
                    os.close(memory)
                self._processes.append(process)
                with contextlib.suppress(OSError):  # It has ended; `wait` finds it so.
                    ours.send((decode, self._arena.pools, self._shape, number))
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Wait until every decoder is ready. Raises CommandError if one cannot start."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            try:
                connection.recv()
            except (EOFError, OSError):
                code = _status(process)
                raise CommandError(f"a process that decodes cannot start (exit code {code})") from None

    def begin(self, block: int, paths: Sequence[str]) -> None:
        """Send the whole block to each process, to no more of them than it has pieces. Raises CommandError."""
        self._blocks += 1
        begun = _Begun(self._blocks, min(self.count, -(-len(paths) // _FILES_TAKEN)), list(paths))
        self._begun.append(begun)
        _taken(self._arena, block)[0] = 0
        asked = pickle.dumps((begun.number, block, begun.paths), pickle.HIGHEST_PROTOCOL)
        for process in range(begun.processes):
            try:
                self._connections[process].send_bytes(asked)  # `send` makes a pickler of its own each time.
            except OSError:
                raise self._ended(process, begun) from None

    def finish(self) -> list[DecodedFile]:
        """Return the files in the order of the paths. A process answers in order. Raises CommandError."""
        begun = self._begun.popleft()
        images = [DecodedFile()] * len(begun.paths)
        for process in range(begun.processes):
            try:
                for place, where, error, encoded in self._connections[process].recv():
                    images[place] = DecodedFile(Placement(*where) if where else None, error, encoded)
            except (EOFError, OSError):
                raise self._ended(process, begun) from None
        return images

    def close(self) -> None:
        """Close the connections, which ends the processes; kill one that does not end."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if _status(process) is None:
                process.kill()
                process.wait()
        self._arena.close()

    def _ended(self, which: int, begun: _Begun) -> CommandError:
        process = self._processes[which]
        code = _status(process)
        number, place = _progress(self._arena, which).tolist()
        paths = begun.paths
        file = paths[place] if number == begun.number else f"one of {paths[0]} to {paths[-1]}"
        return CommandError(f"a decoder has ended (exit code {code}) with {file}: leave that file out")


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code, minus the signal; None if the process does not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_STOP_TIMEOUT_S)
    return None


def main() -> None:
    """Run a decoder's process: decode files of blocks until the other end closes.

    Its arguments are two descriptors: the connection's and the memory's.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the command decides.
    torch.set_num_threads(1)
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    decode: Decode
    pools: tuple[Pool, ...]
    with contextlib.suppress(EOFError, OSError):
        decode, pools, shape, process = connection.recv()
        # Opened again: only then is a lock on it this process's own, and ends with the process.
        taking = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)
        arena = Arena.opened(pools, memory)
        pixels, progress = _pixels(arena, shape), _progress(arena, process)
        connection.send(None)
        while True:
            number, block, paths = connection.recv()
            decoded = []
            for place in _places(_taken(arena, block), len(paths), taking):
                progress[:] = number, place
                decoded.append((place, *_plain(decode.file(paths[place], pixels[block][place]))))
            connection.send(decoded)


def _places(taken: npt.NDArray[np.int64], count: int, taking: int) -> Iterator[int]:
    """Yield files of a block that no process has taken, until all are. `taken`: their number; `taking`: the lock."""
    while True:
        fcntl.flock(taking, fcntl.LOCK_EX)
        first = int(taken[0])
        taken[0] = last = min(count, first + _FILES_TAKEN)
        fcntl.flock(taking, fcntl.LOCK_UN)
        if first == count:
            return
        yield from range(first, last)


def _plain(decoded: DecodedFile) -> tuple[tuple[float, ...] | None, str, bytes | None]:
    """Convert to a tuple: tuples travel in a fifth of the time that dataclasses take."""
    at = decoded.placement
    where = None if at is None else (at.width, at.height, at.scale, at.pad_x, at.pad_y)
    return where, decoded.error, decoded.encoded


def _pixels(arena: Arena, shape: tuple[int, ...]) -> list[Tensor]:
    return [torch.from_numpy(arena.slot(0, batch)).view(shape) for batch in range(arena.pools[0].count)]


def _progress(arena: Arena, process: int) -> npt.NDArray[np.int64]:
    """Return the number of the block that the process is at, and the place of the file in it."""
    return arena.slot(1, process).view(np.int64)


def _taken(arena: Arena, block: int) -> npt.NDArray[np.int64]:
    """Return the number of files taken of a block."""
    return arena.slot(2, block).view(np.int64)


def _threads(count: int) -> ThreadPoolExecutor:
    """Make threads that each compute alone: an image is too small to share among threads that wait for each other.

    PyTorch keeps the number of threads of an operation by calling thread, from the thread's first query on.
    """
    started = threading.Barrier(count)

    def begin() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        started.wait()

    threads = ThreadPoolExecutor(count, thread_name_prefix="decode", initializer=begin)
    # A pool starts a thread when it gets work and none is idle: all begin now, before another number is set.
    list(threads.map(lambda _: None, range(count)))
    return threads
