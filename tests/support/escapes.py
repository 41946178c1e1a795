"""Actions that a process which reads untrusted bytes must be unable to do, each tried for real in that process.

Imports nothing of this repository: `program` puts this file into a .pt2, like an attacker who has found a way in.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import json
import logging
import multiprocessing
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

MARK = "escape-secret-"
"""Beginning of the secrets that tests put into environments; its uses put it together, else it would find itself."""
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)


def _numbers(text: str) -> dict[str, int]:
    """Return the numbers of calls here. `text`: those on x86-64 and on AArch64."""
    return {name: int(numbers[_COLUMN]) for name, *numbers in (entry.split() for entry in text.split(","))}


_OF_PROCESSES = _numbers(
    """rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_open 434 434, process_vm_readv 310 270,
    process_vm_writev 311 271, kcmp 312 272, move_pages 279 239, migrate_pages 256 238, sched_setattr 314 274"""
)
"""Calls with the parent's process id as the first argument; they would change nothing, but must be refused."""
_OF_NOBODY = _numbers(
    """process_madvise 440 440, process_mrelease 448 448, open_by_handle_at 304 265, userfaultfd 323 282,
    io_uring_setup 425 425, perf_event_open 298 241, bpf 321 280, keyctl 250 219, unshare 272 97, mount 165 40,
    fsopen 430 430, shmget 29 194, semget 64 190, msgget 68 186, mq_open 240 180, inotify_init1 294 26,
    fanotify_init 300 262"""
)
_NUMBERS = {
    **_OF_PROCESSES,
    **_OF_NOBODY,
    **_numbers("tgkill 234 131, ioprio_set 251 30, name_to_handle_at 303 264, clone 56 220"),
}


def called(name: str, *arguments: object) -> int:
    """Make a system call by its number. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    found: int = libc.syscall(_NUMBERS[name], *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), name)
    return found


def attempts(secret: str, target: str) -> dict[str, Callable[[], object]]:
    """Return the attempts by name. `secret`: a file that it must not read; `target`: one that it must not write."""
    parent = os.getppid()

    def ptrace() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(16, parent, 0, 0) != 0:  # PTRACE_ATTACH
            raise OSError(ctypes.get_errno(), "ptrace")

    return {
        "read a file": lambda: Path(secret).read_text(),
        "write a file": lambda: Path(target).write_text("x"),
        "make a folder": lambda: Path(target).mkdir(),
        "delete a file": lambda: Path(secret).unlink(),
        "truncate a file": lambda: os.truncate(secret, 0),
        "move a file": lambda: os.rename(secret, target),
        "link a file": lambda: os.link(secret, target),
        "list a folder": lambda: os.listdir(Path(secret).parent),
        "change a file's mode": lambda: os.chmod(secret, 0o666),
        "change a file's owner": lambda: os.chown(secret, os.getuid(), os.getgid()),
        "change a file's time": lambda: os.utime(secret),
        "mark a file": lambda: os.setxattr(secret, "user.mark", b"x"),
        "open a socket": lambda: socket.socket().close(),
        "open a socket of another kind": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).close(),
        "run a shell": lambda: subprocess.run(["/bin/sh", "-c", "true"], check=True),
        "become a shell": lambda: os.execv("/bin/sh", ["/bin/sh", "-c", "true"]),
        "fork": lambda: os.fork() or os._exit(0),
        "clone": lambda: called("clone", 17, 0, 0, 0, 0) or os._exit(0),
        "signal its parent": lambda: os.kill(parent, 0),
        "signal its group": lambda: os.kill(0, 0),
        "signal a thread of its parent": lambda: called("tgkill", parent, parent, 0),
        "own a signal of its parent": lambda: fcntl.fcntl(2, fcntl.F_SETOWN, parent),
        "choose a signal": lambda: fcntl.fcntl(2, 10, 9),  # F_SETSIG
        "type into the terminal": lambda: fcntl.ioctl(2, 0x5412, b"x"),  # TIOCSTI
        "read its parent's environment": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        "read its parent's command line": lambda: Path(f"/proc/{parent}/cmdline").read_bytes(),
        "read its parent's memory": lambda: open(f"/proc/{parent}/mem", "rb").close(),
        "list its parent's files": lambda: os.listdir(f"/proc/{parent}/fd"),
        "trace its parent": ptrace,
        "limit its parent": lambda: resource.prlimit(parent, resource.RLIMIT_CPU),
        "weigh its parent": lambda: os.setpriority(os.PRIO_PROCESS, parent, os.getpriority(os.PRIO_PROCESS, 0)),
        "place its parent": lambda: os.sched_setaffinity(parent, os.sched_getaffinity(0)),
        "schedule its parent": lambda: os.sched_setscheduler(parent, os.SCHED_OTHER, os.sched_param(0)),
        "weigh what its parent reads": lambda: called("ioprio_set", 1, parent, 0),
        "name a file by handle": lambda: called("name_to_handle_at", -100, secret.encode(), b"\x80" * 136, b"0" * 8, 0),
        **{f"{name} of its parent": lambda name=name: called(name, parent, 0, 0, 0, 0, 0) for name in _OF_PROCESSES},  # type: ignore[misc]
        **{name: lambda name=name: called(name, 0, 0, 0, 0, 0, 0) for name in _OF_NOBODY},  # type: ignore[misc]
    }


def tried(secret: str, target: str, others: dict[str, Callable[[], object]] | None = None) -> dict[str, str]:
    """Try each and return its result: "refused", or the actual effect."""
    found = {}
    for name, attempt in {**attempts(secret, target), **(others or {})}.items():
        try:
            attempt()
        except (PermissionError, BlockingIOError):
            found[name] = "refused"
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "done"
    return found


def thread() -> str:
    try:
        started = threading.Thread(target=int)
        started.start()
        started.join()
    except RuntimeError:
        return "refused"
    return "done"


def marks() -> list[str]:
    """Find the secrets anywhere in this process's memory or environment, except those that it has put together."""
    wanted = re.compile(b"escape-" + b"secret-" + rb"\w+")
    found = {each.decode() for each in wanted.findall(Path("/proc/self/environ").read_bytes())}
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps.readlines():
            places, rights = line.split()[:2]
            begin, end = (int(each, 16) for each in places.split("-"))
            if rights[0] == "r" and end < 1 << 63 and "[v" not in line:
                try:
                    memory.seek(begin)
                    while begin < end and (piece := memory.read(min(1 << 24, end - begin))):
                        begin += len(piece)
                        found |= {each.decode() for each in wanted.findall(piece)}
                except OSError:
                    continue
    return sorted(found)


def memories() -> list[int]:
    """Return the sizes of the arena's memories that this process has, mapped or by descriptor."""
    found = {}
    for number, name in _open_files().items():
        if "anychip-arena" in name:
            status = os.stat(number)
            found[status.st_ino] = status.st_size
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "anychip-arena" in line:
                found.setdefault(int(line.split()[4]), -1)
    return sorted(found.values())


def _open_files() -> dict[int, str]:
    found = {}
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # The descriptor that listed them is closed already.
            found[int(each)] = os.readlink(f"/proc/self/fd/{each}")
    return found


def serve_escape(secret: str, target: str, files: dict[str, str], way: str = "program") -> None:
    """Try everything in the process that serves, for `program`; write the results to stderr, once for each `way`."""
    ways: set[str] = sys.__dict__.setdefault("escapes_tried", set())
    if "#" not in multiprocessing.current_process().name or way in ways:
        return
    ways.add(way)
    others = {name: lambda file=file: Path(file).read_bytes() for name, file in files.items()}
    found = {
        "way": way,
        "tried": tried(secret, target, others),  # type: ignore[arg-type]
        "marks": marks() if len(ways) == 1 else [],  # It takes a second or two.
        "memories": memories(),
        "process": os.getpid(),
        "descriptors": sorted({*_open_files().values()}),
        "environment": sorted(os.environ),
    }
    os.write(2, f"\nESCAPED {json.dumps(found)}\n".encode())


def program(plain: Path, file: Path, secret: Path, target: Path, files: dict[str, str]) -> None:
    """Write `file`: the content of `plain`, a .pt2 with a batch of any size, and an expression that runs this file."""
    source = Path(__file__).read_text(encoding="utf-8")
    source += f"\nserve_escape({str(secret)!r}, {str(target)!r}, {files!r})\n"
    code = base64.b64encode(f"exec({source!r}, {{'__name__': 'escapes', '__file__': ''}})".encode()).decode()
    ran = f"__import__('builtins').exec(__import__('base64').b64decode('{code}'))"
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as changed:
        for entry in archive.infolist():
            data = archive.read(entry)
            if entry.filename.endswith(".json") and b"expr_str" in data:
                content = json.loads(data)
                assert _replaced(content, ran)
                data = json.dumps(content).encode()
            changed.writestr(entry.filename.replace(plain.stem, file.stem), data)


def _replaced(content: object, ran: str) -> bool:
    if isinstance(content, dict):
        if "expr_str" in content:
            content["expr_str"] = f"[{ran}, {content['expr_str']}][1]"
            return True
        content = list(content.values())
    return isinstance(content, list) and any(_replaced(each, ran) for each in content)


# For decoders: memory that none of their limits counts, and the service's streams.


def grown() -> list[int]:
    """Return the descriptors of memory that this process could make larger."""
    found = []
    for descriptor in range(3, 64):
        try:
            os.lseek(descriptor, 0, os.SEEK_END)
        except OSError:  # It is none, or a socket.
            continue
        with contextlib.suppress(OSError):
            os.write(descriptor, b"x")
            found.append(descriptor)
    return found


def forge_lines() -> None:
    """Write lines that look like the audit's, to the streams and through logging."""
    for stream in (1, 2):
        os.write(stream, FORGED.encode() + b"\n")
    logging.getLogger("anychip.audit").info(FORGED)
    logging.getLogger().critical(FORGED)


FORGED = '{"logger":"anychip.audit","message":"load","key":"forged"}'
