"""Confinement of a process before it reads untrusted data: files that are programs, images of strangers.

    limits of resources ─► landlock: which files ─► seccomp: which system calls

These means of Linux bind the calling process for good. Where the kernel lacks one, the others hold, and
`what_there_is` says so. Must not know what the process is for.

System calls are named by number, so only x86-64 and AArch64 are known here; elsewhere there is no filter. Numbers are
those of linux/arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h; layouts those of
linux/landlock.h, linux/seccomp.h and linux/filter.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import json
import logging
import os
import platform
import re
import resource
import stat
import struct
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from anychip_base.interpreter import OURS

log = logging.getLogger("anychip.confinement")
_MACHINE = platform.machine()
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(_MACHINE)
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000


def _table(text: str) -> Mapping[str, int]:
    """Return the number of each call that this processor has. `text`: of all, those on x86-64 and on AArch64."""
    rows = [entry.split() for entry in text.split(",")] if _COLUMN is not None else []
    return {name: int(numbers[_COLUMN or 0]) for name, *numbers in rows if numbers[_COLUMN or 0] != "-"}


_DECODING = _table(
    """
    read 0 63, write 1 64, readv 19 65, writev 20 66, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226,
    munmap 11 215, brk 12 214, mremap 25 216, msync 26 227, madvise 28 233, rt_sigaction 13 134, rt_sigprocmask 14 135,
    rt_sigreturn 15 139, sigaltstack 131 132, sched_yield 24 124, poll 7 -, ppoll 271 73, nanosleep 35 101,
    clock_nanosleep 230 115, clock_gettime 228 113, gettimeofday 96 169, futex 202 98, getpid 39 172, gettid 186 178,
    getppid 110 173, exit 60 93, exit_group 231 94, restart_syscall 219 128, getrandom 318 278, recvfrom 45 207,
    sendto 44 206, recvmsg 47 212, sendmsg 46 211, getrusage 98 165, sysinfo 99 179, times 100 153,
    sched_getaffinity 204 123, set_robust_list 273 99, rseq 334 293, membarrier 324 283, getuid 102 174,
    geteuid 107 175, getgid 104 176, getegid 108 177
    """
)
"""Calls of a process that computes on memory it has and talks over sockets it has."""

_NEVER = _table(
    """
    fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, socket 41 198, socketpair 53 199, connect 42 203,
    bind 49 200, listen 50 201, accept 43 202, accept4 288 242, ptrace 101 117, process_vm_readv 310 270,
    process_vm_writev 311 271, pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424, mount 165 40,
    umount2 166 39, pivot_root 155 41, chroot 161 51, fsopen 430 430, fspick 433 433, open_tree 428 428,
    move_mount 429 429, mount_setattr 442 442, unshare 272 97, setns 308 268, bpf 321 280, perf_event_open 298 241,
    userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, keyctl 250 219,
    add_key 248 217, request_key 249 218, init_module 175 105, finit_module 313 273, kexec_load 246 104, reboot 169 142,
    swapon 167 224, setuid 105 146, setgid 106 144, setresuid 117 147, setresgid 119 149, rt_sigqueueinfo 129 138,
    rt_tgsigqueueinfo 297 240, setpriority 141 140, sched_setparam 142 118, sched_setscheduler 144 119,
    sched_setattr 314 274, ioprio_set 251 30, process_madvise 440 440, process_mrelease 448 448, kcmp 312 272,
    move_pages 279 239, migrate_pages 256 238, name_to_handle_at 303 264, open_by_handle_at 304 265, chmod 90 -,
    fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, lchown 94 -, fchown 93 55, fchownat 260 54,
    truncate 76 45, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6,
    fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, shmget 29 194, shmat 30 196,
    shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191, msgget 68 186, msgsnd 69 189, msgrcv 70 188,
    msgctl 71 187, mq_open 240 180, mq_unlink 241 181, inotify_init 253 -, inotify_init1 294 26, fanotify_init 300 262
    """
)
"""Calls that no network of a file needs: other programs, other processes, the network, the system. Also calls on files
that Landlock does not cover (modes, owners, times, opening by handle), and named memory and queues.
"""

_STARTING = ("fork", "vfork", "execve", "socketpair")
_CONNECTING = ("socket", "connect")
"""Calls of `_NEVER` that a server needs to start its own programs, and to connect to other machines."""

_OF_ITSELF = _table("kill 62 129, tkill 200 130, tgkill 234 131, prlimit64 302 261, sched_setaffinity 203 122")
"""Calls whose first argument is a process and must be this one: libraries end and limit their own process, and OpenVINO
gives each of its threads a core.
"""
_ZERO_IS_ITSELF = ("prlimit64", "sched_setaffinity")

_COMMANDING = _table("fcntl 72 25, ioctl 16 29")
_NO_COMMANDS = {
    "fcntl": (8, 10, 15),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: the kernel would send the signal.
    "ioctl": (0x8901, 0x8902, 0x5412, 0x541C, 0x5423),  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX, TIOCSETD
}
"""Forbidden values of the second argument, by call. A process that may write to a terminal could type there."""

_CLONE, _CLONE3 = {"x86_64": 56}.get(_MACHINE, 220), 435
_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 38, 4
_SECCOMP, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = {"x86_64": 317}.get(_MACHINE, 277), 1, 1
_CAPSET = {"x86_64": 126}.get(_MACHINE, 91)
_CAPABILITY_VERSION_3 = 0x20080522
_READ_ANY_FILE = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root can still read files of others, if Landlock lets it."""
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_RET_ALLOW, _RET_ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_CLONE_THREAD = 0x00010000
_FIRST_ARGUMENT, _SECOND_ARGUMENT = 16, 24  # Their lower halves.

# linux/landlock.h: rights over files, by the version that brought them.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_RIGHTS_V1 = (1 << 13) - 1
_RIGHTS = {1: _RIGHTS_V1, 2: _RIGHTS_V1 | 1 << 13, 3: _RIGHTS_V1 | 3 << 13, 4: _RIGHTS_V1 | 3 << 13}
_RIGHTS_NEWEST = _RIGHTS_V1 | 7 << 13  # From version 5 on: ioctl on devices, too.
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
_NET_TCP = 3  # bind, connect; from version 4 on
_SCOPES, _SCOPED = 3, 6  # abstract sockets, signals; from version 6 on


_OWN_PROCESS = Path("/proc/self")
_SYSTEM = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share", "/lib", "/lib64", "/etc/ld.so.cache"),
    *(str(_OWN_PROCESS), "/proc/cpuinfo", "/proc/meminfo", "/proc/stat"),
    *("/sys/devices/system", "/sys/fs/cgroup", "/dev/urandom"),
)
_OF_NETWORK = tuple(
    Path("/etc", name) for name in ("resolv.conf", "hosts", "nsswitch.conf", "gai.conf", "host.conf", "ssl", "pki")
)
_MODULES = (".py", ".so", ".dist-info", ".egg-info", ".libs")
_PROJECT = (".git", "pyproject.toml", "setup.py")
_LATER = (
    *("PIL", "cv2", "google", "numpy", "onnx", "onnxruntime", "onnxscript", "openvino", "safetensors", "timm", "torch"),
    *("torchao", "torchvision", "transformers", "yaml"),
)
"""Packages that readers of files import when a file needs them."""


@dataclass(frozen=True, slots=True)
class WhatThereIs:
    """Means of this kernel: the version of landlock (0: none), and whether system calls can be filtered."""

    landlock: int
    seccomp: bool


def what_there_is() -> WhatThereIs:
    """Ask the kernel which means it has, changing nothing."""
    libc = _libc()
    if libc is None or _COLUMN is None:
        return WhatThereIs(0, seccomp=False)
    version = max(0, libc.syscall(_LANDLOCK_CREATE, None, 0, 1))
    action = ctypes.c_uint32(_RET_ERRNO)
    return WhatThereIs(version, libc.syscall(_SECCOMP, 2, 0, ctypes.byref(action)) == 0)


def confine_decoder(memory_bytes: int) -> None:
    """Forbid opening files, new sockets, processes and threads. The kernel refuses every other call, too (EPERM).

    `memory_bytes`: how much more address space the process may take.
    """
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit_memory(memory_bytes)
    libc = _ready()
    if libc is None:
        return
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # Another process of this user can no longer trace it either.
    _drop_capabilities(libc, 0)
    _restrict_files(libc, (), ())
    _filter(libc, [*_answering(_DECODING.values(), _ALLOW), *_of_itself(), _REFUSE])


def confine_program(
    readable: Iterable[Path],
    writable: Iterable[Path],
    *,
    own: Iterable[Path] = (),
    memory_bytes: int | None,
    seconds: int | None = None,
) -> None:
    """Forbid other programs, processes and sockets. Files in `readable` may be read, those in `writable` also written.

    For a process that runs a file's program. `own`: the files of that network, readable only if they are plain files; a
    link among them opens nothing. `memory_bytes`: as for decoders, None: unlimited; `seconds`: of processor time.
    """
    _limit(resource.RLIMIT_CORE, 0)
    if memory_bytes is not None:
        _limit_memory(memory_bytes)
    if seconds is not None:
        _limit(resource.RLIMIT_CPU, seconds)
    libc = _ready()
    if libc is None:
        return
    _drop_capabilities(libc, _READ_ANY_FILE)
    _restrict_files(libc, readable, writable, own)
    _filter(libc, _refusing(_NEVER.values()))


def confine_server(readable: Iterable[Path], *, network: bool) -> None:
    """Forbid new sockets and writing files; allow reading `readable`, and processes of its own, which are confined
    alike. Sockets that it has or is handed still work.

    For a process that answers strangers' requests on connections that another process accepted. `network`: it may also
    connect to other machines. Signals reach its own processes where Landlock can scope them, else only itself.
    """
    _limit(resource.RLIMIT_CORE, 0)
    libc = _ready()
    if libc is None:
        return
    _drop_capabilities(libc, _READ_ANY_FILE)
    programs = [Path(sys.executable).resolve(), Path(sys.prefix) / "pyvenv.cfg"]
    nothing = [Path(os.devnull)]
    _restrict_files(libc, [*readable, *programs, *nothing, *(_OF_NETWORK if network else ())], nothing, network=network)
    scoped = what_there_is().landlock >= _SCOPED
    allowed = (*_STARTING, *(_CONNECTING if network else ()))
    never = [number for name, number in _NEVER.items() if name not in allowed]
    _filter(libc, _refusing(never, itself=_ZERO_IS_ITSELF if scoped else _OF_ITSELF, starts=True))


def begun_before() -> list[str]:
    """Return the names of this process's other threads. Landlock binds only the caller and later threads."""
    found = []
    for each in Path("/proc/self/task").iterdir():
        if int(each.name) != threading.get_native_id():
            with contextlib.suppress(OSError):  # It has ended.
                found.append((each / "comm").read_text().strip())
    return found


def refuse_rings() -> None:
    """Refuse io_uring, whose calls bypass the filter of system calls. libuv works without it, if its loop begins so."""
    libc = _ready()
    if libc is not None:
        rings = [number for name, number in _NEVER.items() if name.startswith("io_uring_")]
        _filter(libc, [*_answering(rings, _REFUSE), _ALLOW])


def python_files() -> list[Path]:
    """Return the places of modules and libraries that are imported on first use, and of Linux's facts on the machine.

    The import system gives the places, as an editable install may be a finder that puts no folder on the path. The list
    has a package's folder, never the folder of a whole project, which may hold anything.
    """
    paths = sysconfig.get_paths()
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    found = [Path(each) for each in (*installed, *libraries, *_SYSTEM) if each]
    # uv and conda can link every file to their caches: there a distribution's folder is given.
    metadata = [each for name in ("purelib", "platlib") for each in Path(paths[name]).glob("*-info/METADATA")]
    linked = {each.resolve().parents[1] for each in metadata}
    given = set(found)
    for entry in map(Path, sys.path):
        if given.isdisjoint((entry, *entry.parents)):
            given.update(_installed_in(entry))
    for place in sorted(linked | {Path(each) for name in _needed() for each in _places(name)}):
        if given.isdisjoint((place, *place.parents)):
            # Some projects declare all that they have to be one package.
            is_project = str(place) in map(os.path.abspath, sys.path) or any(
                (place / each).exists() for each in _PROJECT
            )
            given.update(_modules_in(place) if is_project else [place])
    return [*found, *sorted(given.difference(found))]


def _installed_in(entry: Path) -> list[Path]:
    # A site-packages folder is given whole: a process that begins later lists it to find modules.
    if entry.is_file() or entry.name in ("site-packages", "dist-packages"):
        return [entry]
    installs = any(True for pattern in ("*.dist-info", "*.egg-info") for _ in entry.glob(pattern))
    return _modules_in(entry) if installs else []


def _modules_in(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [each for each in folder.iterdir() if each.suffix in _MODULES or (each / "__init__.py").is_file()]
    return []


def _needed() -> set[str]:
    """Return names of packages: ours, those this process has imported, those that any of them may import later."""
    names = {*OURS, *_LATER, *sys.modules}
    for each in distributions():
        names.update(entry.value for entry in each.entry_points if entry.group.startswith("anychip."))
        with contextlib.suppress(ValueError, AttributeError):  # PEP 610 has not reached its installer.
            if json.loads(each.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
                # The metadata may say nothing of its packages.
                names.update((each.read_text("top_level.txt") or each.metadata["Name"].replace("-", "_")).split())
    return {re.split(r"[.:]", name, maxsplit=1)[0] for name in names} - {"__main__"}


def _places(name: str) -> list[str]:
    try:
        spec = getattr(sys.modules.get(name), "__spec__", None) or importlib.util.find_spec(name)
    except Exception:  # Finders of other packages may raise anything.
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return list(spec.submodule_search_locations)
    return [spec.origin] if spec.has_location and spec.origin else []


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long
        _ = libc.prctl
    except (OSError, AttributeError):
        return None
    return libc


def _ready() -> ctypes.CDLL | None:
    """Set no_new_privs, which Landlock and seccomp need: privileges never grow again. None: neither is available."""
    libc = _libc()
    if libc is None or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return None
    return libc


def _drop_capabilities(libc: ctypes.CDLL, kept: int) -> None:
    """Drop this thread's capabilities but `kept`: root with all could read any memory in /proc (CAP_PERFMON)."""
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    libc.syscall(_CAPSET, header, struct.pack("<6I", kept, kept, 0, 0, 0, 0))


def _limit(kind: int, most: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # It is lower already.
        resource.setrlimit(kind, (most, most))


def _limit_memory(memory_bytes: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)


def _restrict_files(
    libc: ctypes.CDLL,
    readable: Iterable[Path],
    writable: Iterable[Path],
    own: Iterable[Path] = (),
    *,
    network: bool = False,
) -> None:
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return
    if others := begun_before():
        log.warning("threads that began before the process was confined still open files: %s", ", ".join(others))
    rights = _RIGHTS.get(version, _RIGHTS_NEWEST)
    attributes = struct.pack(
        "<QQQ", rights, 0 if network or version < 4 else _NET_TCP, 0 if version < _SCOPED else _SCOPES
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(_LANDLOCK_CREATE, attributes, size, 0)
    if rules < 0:
        return
    try:
        for path in readable:
            _allow_beneath(libc, rules, path, rights & (_EXECUTE | _READ_FILE | _READ_DIR))
        for path in writable:
            _allow_beneath(libc, rules, path, rights & ~_EXECUTE)
        for path in own:
            _allow_beneath(libc, rules, path, rights & _READ_FILE, os.O_NOFOLLOW)
        if libc.syscall(_LANDLOCK_RESTRICT, rules, 0) != 0:
            raise OSError(ctypes.get_errno(), "landlock refuses its own rules")
    finally:
        os.close(rules)


def _allow_beneath(libc: ctypes.CDLL, rules: int, path: Path, rights: int, flags: int = 0) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    except OSError:
        return  # A missing path needs no permission.
    try:
        mode = os.fstat(beneath).st_mode
        if flags and not stat.S_ISREG(mode):
            return
        if not stat.S_ISDIR(mode):
            rights &= _OF_A_FILE
        rule = struct.pack("<Qi", rights, beneath)
        if libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0) != 0:
            raise OSError(ctypes.get_errno(), f"landlock refuses {path}")
    finally:
        # /proc makes an entry anew when memory is short: the rule holds for this entry, which stays while it is open.
        if not path.is_relative_to(_OWN_PROCESS.parent):
            os.close(beneath)


Instruction = tuple[int, int, int, int]
"""Instruction of a classic BPF program: code, jump if true, jump if false, operand."""
_ALLOW: Instruction = (_RETURN, 0, 0, _RET_ALLOW)
_REFUSE: Instruction = (_RETURN, 0, 0, _RET_ERRNO | errno.EPERM)


def _answering(numbers: Iterable[int], answer: Instruction) -> list[Instruction]:
    """Begin a program that returns `answer` for these calls, and refuses those of another architecture."""
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _AUDIT_ARCH.get(_MACHINE, 0)),
        _REFUSE,
        (_LOAD, 0, 0, 0),
    ]
    if _MACHINE == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32_BIT), _REFUSE]
    for number in numbers:
        program += [(_EQUAL, 0, 1, number), answer]
    return program


_CLONES: Sequence[Instruction] = (
    (_EQUAL, 0, 1, _CLONE3),
    (_RETURN, 0, 0, _RET_ERRNO | errno.ENOSYS),
    (_EQUAL, 0, 4, _CLONE),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_ANY_BIT, 1, 0, _CLONE_THREAD),
    _REFUSE,
    _ALLOW,
)
"""Allow new threads, refuse new processes. clone3 hides its flags in memory, so ENOSYS makes glibc use clone."""


def _refusing(numbers: Iterable[int], *, itself: Iterable[str] = _OF_ITSELF, starts: bool = False) -> list[Instruction]:
    program = _answering(numbers, _REFUSE)
    for name, number in _COMMANDING.items():
        after = [each for command in _NO_COMMANDS[name] for each in ((_EQUAL, 0, 1, command), _REFUSE)]
        program += [(_EQUAL, 0, len(after) + 2, number), (_LOAD, 0, 0, _SECOND_ARGUMENT), *after, _ALLOW]
    return [*program, *_of_itself(itself), *(() if starts else _CLONES), _ALLOW]


def _of_itself(names: Iterable[str] = _OF_ITSELF) -> list[Instruction]:
    """Allow signals, limits and cores for this process alone; for kill, 0 is its whole group and refused."""
    program: list[Instruction] = []
    for name in names:
        itself: list[Instruction] = [(_EQUAL, 0, 1, os.getpid()), _ALLOW]
        if name in _ZERO_IS_ITSELF:
            itself = [(_EQUAL, 1, 0, 0), *itself]
        program += [(_EQUAL, 0, len(itself) + 2, _OF_ITSELF[name]), (_LOAD, 0, 0, _FIRST_ARGUMENT), *itself, _REFUSE]
    return program


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _filter(libc: ctypes.CDLL, program: Sequence[Instruction]) -> None:
    """Apply the filter to every existing thread. Does nothing if the kernel has no filter. Raises OSError."""
    if not what_there_is().seccomp:
        return
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in program))
    described = _Program(len(program), ctypes.cast(code, ctypes.c_void_p))
    if libc.syscall(_SECCOMP, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(described)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses the filter of system calls")
