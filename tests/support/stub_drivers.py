"""Build of the stub drivers of tests/support/stubs, so that vendors' own packages run without their hardware, and of
torch_openreg, a device of PyTorch's own tests. A build serves one version of torch: its headers are compiled in. It is
whole or missing, also if several processes build at once.

    cudart ─► PyTorch's own torch.cuda, in a Python with the CUDA 13 build of torch
    cann   ─► Huawei's own torch_npu, as its wheel has it, beside a CPU build of torch or one for CUDA

The variables are for children only: LD_PRELOAD puts the stub under every program that is started with it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.vendor_sources import wheel

ROOT = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "stubs"
OPENREG = "test/cpp_extensions/open_registration_extension/torch_openreg"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "anychip-tests")
TORCH_NPU = "2.14.0"
"""The version that runs beside this environment's torch. Others have a Python of their own: make npu-environment."""
_CANN_LIBRARIES = ("libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
_FLAGS = ("-O1", "-w", "-fPIC")

# Asks without importing torch, as a vendor's package may make that fail.
_ASK = """
import importlib.util as u, json, pathlib, runpy
folder = pathlib.Path(u.find_spec("torch").origin).parent
version = runpy.run_path(str(folder / "version.py"))
print(json.dumps([str(folder), version["__version__"], version["cuda"], u.find_spec("torch_npu") is not None]))
"""


@dataclass(frozen=True)
class Torch:
    """PyTorch build of some Python; `npu`: torch_npu is beside it. `cuda` is None for a CPU build."""

    folder: Path
    version: str
    cuda: str | None
    npu: bool


def cudart(python: str | Path) -> dict[str, str]:
    """Return the variables with which a child of `python` runs torch.cuda over the stub; skips the test without it."""
    torch = _torch(python)
    if not (torch.cuda or "").startswith("13."):
        pytest.skip(f"the stub CUDA runtime fits CUDA 13 builds of torch, not torch {torch.version}")
    if not _cuda_headers(torch).is_dir():
        pytest.skip("the headers of the CUDA runtime did not come with this torch")
    folder = _built("cudart", torch)
    libraries = f"{folder / 'libcudart.so.13'}:{folder / 'libcuda.so.1'}"
    return {"LD_PRELOAD": libraries, "STUB_DIR": str(folder), "STUB_DEVICE": "cuda"}


def cann(python: str | Path) -> dict[str, str]:
    """Return the variables with which a child of `python` runs torch_npu over the stub; skips the test without it."""
    torch = _torch(python)
    variables = {} if torch.npu else {"PYTHONPATH": f"{ROOT}:{_torch_npu(torch)}"}
    folder = _built("cann", torch)
    return {**variables, "LD_LIBRARY_PATH": str(folder), "STUB_DIR": str(folder), "STUB_DEVICE": "npu"}


def openreg() -> Path:
    """Return a folder that holds torch_openreg, built for this Python's torch. Skip the test without its sources."""
    torch = _torch(sys.executable)
    version = torch.version.partition("+")[0]
    named = os.environ.get("ANYCHIP_TEST_OPENREG_SOURCES")
    try:
        sources = (
            Path(named) if named else _kept(CACHE / f"pytorch-{version}", lambda at: _clone(at, version)) / OPENREG
        )
    except RuntimeError as error:
        pytest.skip(f"git gets no sources of PyTorch ({error}): ANYCHIP_TEST_OPENREG_SOURCES can name a folder")
    # PyTorch's own CMake file wants CUDA's compiler wherever torch is built for CUDA.
    return _kept(CACHE / f"openreg-{sources.parent.name}-torch{version}", lambda at: _build_openreg(at, sources, torch))


def _clone(folder: Path, version: str) -> None:
    sparse = ("--depth=1", "--filter=blob:none", "--sparse", f"--branch=v{version}")
    _run(["git", "clone", "--quiet", *sparse, "https://github.com/pytorch/pytorch", str(folder)])
    _run(["git", "-C", str(folder), "sparse-checkout", "set", OPENREG])


def _build_openreg(folder: Path, sources: Path, torch: Torch) -> None:
    package = folder / "torch_openreg"
    shutil.copytree(sources / "torch_openreg", package, ignore=shutil.ignore_patterns("csrc"))
    (package / "lib").mkdir(exist_ok=True)
    of_torch = (torch.folder / "include", torch.folder / "include/torch/csrc/api/include")
    of_python = sysconfig.get_paths()["include"]
    headers = (sources, sources / "csrc", sources / "third_party/openreg", *of_torch, of_python)
    options = ("-std=c++20", "-fvisibility=hidden", *(f"-I{each}" for each in headers))
    libraries = [f"-L{torch.folder / 'lib'}", f"-L{package / 'lib'}", "-lpthread", "-ltorch_cpu", "-lc10"]
    parts = {"openreg": "third_party/openreg/csrc", "torch_openreg": "csrc", "torch_bindings": "torch_openreg/csrc"}
    for name, part in parts.items():
        files = [each for each in sorted((sources / part).rglob("*.cpp")) if "standalone" not in each.parts]
        objects = [folder / f"{name}-{number}.o" for number in range(len(files))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda file, to: _compile(*options, "-c", file, "-o", to), files, objects))
        own = [f"-l{each}" for each in parts if (package / "lib" / f"lib{each}.so").exists()]
        python = ["-ltorch_python"] if name == "torch_bindings" else []
        to = ("-o", package / "lib" / f"lib{name}.so", "-Wl,-rpath,$ORIGIN")
        _compile("-shared", *objects, *to, *own, *libraries, *python)
    stub = (sources / "torch_openreg/csrc/stub.c", "-o", package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
    link = (f"-I{of_python}", f"-L{package / 'lib'}", "-ltorch_bindings", "-Wl,-rpath,$ORIGIN/lib")
    _compile("-x", "c", "-shared", *stub, *link)


def _torch_npu(torch: Torch) -> Path:
    """Return the folder of torch_npu's unpacked wheel. Skip the test where there is none for this torch and Python."""
    if torch.version.split(".")[:2] != TORCH_NPU.split(".")[:2]:
        pytest.skip(f"torch_npu {TORCH_NPU} is not for torch {torch.version}")
    found = wheel("torch-npu", TORCH_NPU)
    if isinstance(found, str):
        pytest.skip(found)
    if f"cp{sys.version_info[0]}{sys.version_info[1]}-" not in found.name:
        pytest.skip(f"{found.name} is for another Python")
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--target"]
    return _kept(CACHE / found.stem, lambda partial: _run([*pip, str(partial), str(found)]))


@functools.cache
def _torch(python: str | Path) -> Torch:
    folder, version, cuda, npu = json.loads(_run([str(python), "-c", _ASK]))
    return Torch(Path(folder), version, cuda, npu)


def _cuda_headers(torch: Torch) -> Path:
    return torch.folder.parent / "nvidia" / "cu13" / "include"


@functools.cache
def _built(kind: str, torch: Torch) -> Path:
    """Return the folder with the stub of `kind`, built now unless the cache has it."""
    if missing := [tool for tool in ("g++", "nm") if shutil.which(tool) is None]:
        pytest.skip(f"the stub drivers are compiled with g++ and nm; missing: {', '.join(missing)}")
    digest = hashlib.sha256()
    for part in (*sorted(path for path in STUBS.rglob("*") if path.suffix in (".cpp", ".h")), Path(__file__)):
        digest.update(part.read_bytes())
    folder = CACHE / f"{kind}-torch{torch.version}-{platform.machine()}-{digest.hexdigest()[:16]}"
    build = {"cudart": _build_cudart, "cann": _build_cann}[kind]
    return _kept(folder, lambda partial: build(partial, torch))


def _kept(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return a folder of the cache, made now unless it is there."""
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=CACHE))
    try:
        make(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # Else another process was first, with the same content.
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _build_cann(folder: Path, torch: Torch) -> None:
    main = folder / "libascendcl.so"
    _compile("-std=c++17", "-shared", STUBS / "cann.cpp", "-o", main)
    # torch_npu links these too; all its calls are in the first.
    link = ("-Wl,--no-as-needed", f"-L{folder}", "-lascendcl", "-Wl,-rpath,$ORIGIN")
    for name in _CANN_LIBRARIES:
        _compile("-x", "c++", "-shared", "/dev/null", "-o", folder / f"{name}.so", *link)
    _build_kernels(folder, torch, "PrivateUse1")


def _build_cudart(folder: Path, torch: Torch) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        ours, rest, version = (Path(scratch, name) for name in ("cudart.o", "rest.c", "version"))
        _compile("-std=c++17", f"-I{STUBS}", f"-I{_cuda_headers(torch)}", "-c", STUBS / "cudart.cpp", "-o", ours)
        # Functions that torch links and cudart.cpp lacks answer "not supported".
        wanted = {name for name in _wanted(torch.folder / "lib", "lib*.so") if re.match("(__)?cuda", name)}
        lacking = sorted(wanted - _symbols("--defined-only", ours))
        rest.write_text(
            "int stub_unsupported();\n"
            + "".join(f"int {name}() {{ return stub_unsupported(); }}\n" for name in lacking)
        )
        _compile("-x", "c", "-c", rest, "-o", rest.with_suffix(".o"))
        version.write_text("libcudart.so.13 { global: *; };\n")
        objects = (ours, rest.with_suffix(".o"), "-o", folder / "libcudart.so.13")
        _compile("-shared", *objects, "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={version}")

        # PyTorch asks the driver library only whether a context is active.
        active = "cuDevicePrimaryCtxGetState"
        wanted = {name for name in _wanted(torch.folder / "lib", "libcaffe2_nvrtc.so") if re.match("cu[A-Z]", name)}
        rest.write_text(
            f"int {active}(int d, unsigned *flags, int *active) {{ *flags = 0; *active = 1; return 0; }}\n"
            + "".join(f"int {name}() {{ return 801; }}\n" for name in sorted(wanted - {active}))
        )
        _compile("-x", "c", "-shared", rest, "-o", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    _build_kernels(folder, torch, "CUDA")


def _build_kernels(folder: Path, torch: Torch, key: str) -> None:
    libraries = (f"-L{torch.folder / 'lib'}", "-ltorch_cpu", "-lc10")
    options = ("-std=c++20", f"-DKEY={key}", f"-I{torch.folder / 'include'}", "-shared")
    _compile(*options, STUBS / "cpu_kernels.cpp", "-o", folder / "cpu_kernels.so", *libraries)


def _wanted(folder: Path, pattern: str) -> set[str]:
    return _symbols("--dynamic", "--undefined-only", *sorted(folder.glob(pattern)))


def _symbols(*arguments: str | Path) -> set[str]:
    lines = _run(["nm", *map(str, arguments)]).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if len(line.split()) > 1}


def _compile(*arguments: str | Path) -> None:
    _run(["g++", *_FLAGS, *map(str, arguments)])


def _run(command: list[str]) -> str:
    # A compiler must not run over a stub driver, even if its caller does.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... failed:\n{done.stderr[-4000:]}")
    return done.stdout
