"""Import path and environment of our processes, and the start of another Python from one of them.

    parent: module_path ─► python_command ─► child: this file, by its absolute path ─► the same path ─► the program

Owns: the order of `sys.path`, the choice of our own `app`, `models` and `backends`, and what a process that runs a
file's program has of the environment. Must not import anything before a child has its path. Python itself begins with
the entries of PYTHONPATH, and, for `-c` and `-m`, with the current folder. A file `torch.py`, `json.py` or `app` there
would run in place of the module that it hides. The option `-P` leaves out the current folder alone, and Python 3.10 has
none.

Installed modules come first, and the user's project last: PYTHONPATH, the folder of a script, the current folder. They
are not left out. Vendors' set-up files name their packages in PYTHONPATH (CANN's set_env.sh: acl, te, tbe), and so do
users who name a module in `--plugins`. A child's environment is unchanged, too: a vendor's compiler starts Pythons of
its own, which need PYTHONPATH as it is.
"""

import sys

if __name__ == "__main__":
    sys.path[:] = sys.argv[1].split("\n")

import os
import re
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

OURS = ("anychip_base", "app", "backends", "models")
_PASSED_ON = re.compile("LD_LIBRARY_PATH|LD_PRELOAD|LANG|(OMP|GOMP|KMP|MKL|ONEDNN|ATEN|OPENBLAS|MALLOC)_[A-Z_]+")
"""Variables that locate libraries or set how they compute and allocate; without them the process would be slower."""
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""Setting that keeps OpenBLAS from starting threads at import (NumPy, OpenCV), as Landlock binds only later threads."""
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended, as shells have it."""
_FILE = os.path.abspath(__file__)
_ROOT = os.path.dirname(os.path.dirname(_FILE))


class _Finder:
    """Finder of our packages beside this one, before others with the same names."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find one of ours, as finders in `sys.meta_path` do; an editable install's finder knows packages' modules,
        too.
        """
        return PathFinder.find_spec(name, path or [_ROOT]) if name.split(".", maxsplit=1)[0] in OURS else None


def settle() -> None:
    """Set this process's order of modules, as its children have it; for processes that are ours from the first line."""
    sys.path[:] = module_path()
    _prefer_installed()
    _report_nothing()
    # Before torch is imported anywhere: a vendor plugin without its driver would make that import fail.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def module_path() -> list[str]:
    """Return the path of this process with absolute folders: installed modules, then the user's project."""
    import sysconfig

    def real(folder: str) -> str:
        return os.path.realpath(folder or ".")

    projects = {real(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    projects |= {real("."), real(os.path.dirname(sys.argv[0]) if sys.argv and sys.argv[0] else ".")}
    installed = ("stdlib", "platstdlib", "purelib", "platlib")
    projects -= {real(sysconfig.get_path(each)) for each in installed}
    # Some entries are no folders: finders of editable installs know theirs again by its text.
    entries = [entry or "." for entry in sys.path]
    path = dict.fromkeys(os.path.abspath(entry) if os.path.exists(entry) else entry for entry in entries)
    return sorted(path, key=lambda entry: real(entry) in projects)


def python_command(*words: str) -> list[str]:
    """Return the command for `python WORDS` (a file, `-m` or `-c`) with this process's options and our path."""
    from multiprocessing.spawn import get_command_line

    options = get_command_line()
    return [sys.executable, *options[1 : options.index("-c")], _FILE, "\n".join(module_path()), *words]


def bare_environment(folder: str = os.sep) -> dict[str, str]:
    """Return the environment for a process that runs a file's program. Only variables of `_PASSED_ON` pass, as others
    may be secret. `folder`: the writable folder, if any.
    """
    return {name: text for name, text in os.environ.items() if _PASSED_ON.fullmatch(name)} | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        **NO_THREADS,
        **_switches(),
        **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"), folder),
    }


def _prefer_installed() -> None:
    """Ask finders of editable installs, which know a few names each, before the path with the user's folders."""
    if PathFinder in sys.meta_path:
        place = sys.meta_path.index(PathFinder)
        sys.meta_path[place:] = [*sys.meta_path[place + 1 :], PathFinder]
    if not any(type(each).__module__ == __name__ for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _report_nothing() -> None:
    """Disable libraries' telemetry. OpenVINO and ONNX Runtime start a thread for it at import, which would also run
    before the process is confined. huggingface_hub asks the Hub for more than the files, and tells it of this machine.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # As if it were not installed.
    os.environ.update(_switches())


def _switches() -> dict[str, str]:
    return {name: os.environ.get(name, "1") for name in ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")}


def _run(first: str, *words: str) -> None:
    """Run as the child of `python_command`."""
    _prefer_installed()
    _report_nothing()
    if first == "-c":
        code, *given = words
        sys.argv = ["-c", *given]
        exec(code, {"__name__": "__main__"})
        return
    import runpy

    if first == "-m":
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *words]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    try:
        _run(*sys.argv[2:])
    except KeyboardInterrupt:  # Ctrl-C of a terminal reaches children, too.
        sys.exit(INTERRUPTED)
