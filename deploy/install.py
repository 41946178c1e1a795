"""Make or renew a virtual environment: the torch build for this machine's accelerator, then anychip.

Owns: the choice of a torch build for this machine, and its source; facts of vendors come from
backends/vendors/. Must not need anything but the standard library and pip, must not load torch, and must not
replace the torch of a vendor's image.

    look ─► Signals ─► choose_torch ─► TorchChoice ─► find_build ─► pip install torch ─► pip install these sources

Settings: ANYCHIP_TORCH = auto, cpu, cuda, rocm, ascend, registry (the registry's torch) or keep (the torch of the
Python that runs this file); ANYCHIP_TORCH_INDEX = another address for download.pytorch.org/whl, for instance a mirror;
ANYCHIP_EXTRAS = further extras of anychip, such as onnx; ANYCHIP_HASHES = a list of deploy/image/hashes.py: files whose
hash is not in it are refused, except torch's own. pip's own variables (PIP_NO_INDEX, …) count too.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ROOT / "plugins"
BROUGHT = ("anychip-ascend", "anychip-hosting", "anychip-samples")
"""Packages of `plugins/` that every environment gets: they need nothing else."""
TAKEN_IN = ("anychip-compat", "anychip-tools")
"""Packages that are parts of anychip now: where both are installed, each of their commands is there twice."""
INDEX = "https://download.pytorch.org/whl"
BESIDE_TORCH_GB, WITH_CUDA_GB = 0.3, 3.3
"""Sizes of what pip loads of a registry, rounded up: the packages beside torch, and these with a torch for CUDA.

Summed over the wheels of constraints.txt for the extra `cpu`, CPython 3.11 and x86-64, on 2026-11-27: 0.24 and 3.25, of
which 2.45 are CUDA's libraries.
"""
KINDS = ("auto", "cpu", "cuda", "rocm", "ascend", "registry", "keep")


def _facts(name: str) -> Any:
    """Load a file of backends/vendors/ by its path: importing the package would import torch."""
    spec = importlib.util.spec_from_file_location(f"anychip_{name}", ROOT / "backends" / "vendors" / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VENDORS, DRIVERS = _facts("table"), _facts("drivers")
ROWS = VENDORS.ACCELERATORS
# CANN -> (torch, torch-npu): the newest that Huawei pairs with it, except 2.8.0, which leaks host memory
# (vllm-project/vllm-ascend#6299).
CANN_PAIRS: dict[str, tuple[str, str]] = {}
for _plugin, _cann in DRIVERS.CANN_OF_TORCH_NPU.items():
    if _plugin != "2.8.0":
        CANN_PAIRS.setdefault(_cann, (_plugin.partition(".post")[0], _plugin))
# The last of the registry for AArch64 without CUDA: `cuda` in torch/version.py of 2.11.0 is 13.0.
ARM_WITHOUT_CUDA = {"torch": "2.10.0", "torchvision": "0.25.0"}
NO_NUMPY_1 = (3, 13)  # The first Python for which numpy 1 has no wheels.
VENDOR_PLUGINS = {package.replace("_", "-") for row in ROWS for package in row.packages}
# The local versions of vendors' builds of torch; `nv26.05` is that of NVIDIA's images.
VENDOR_BUILD = re.compile(rf"\+.*({'|'.join(tag for row in ROWS for tag in row.build_tags)}|\bnv\d)")


class InstallError(Exception):
    """Failure of the set-up; the message says what to do."""


@dataclass(frozen=True)
class Signals:
    """Facts of the machine that need no driver to load. `present`: packages installed for the running Python."""

    linux: bool = True
    nvidia: bool = False
    amd: bool = False
    ascend: bool = False
    cann: str = ""
    present: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TorchChoice:
    """Torch to install. `build`: beginning of its local version on the PyTorch index; empty: the registry's.

    `pins` are versions by package name, `constraints` other lines about packages; both win over constraints.txt. A
    failing `optional_extra` is only reported.
    """

    kind: str
    saw: str
    pins: Mapping[str, str]
    build: str = ""
    extras: tuple[str, ...] = ()
    optional_extra: str = ""
    constraints: tuple[str, ...] = ()

    def accepts(self, torch: str) -> bool:
        """Return True if the torch that the environment already has will do.

        Asking the index again could change the build under a working environment, only because the network was slow.
        """
        public, _, local = torch.partition("+")
        if self.kind == "keep" or public != self.pins["torch"]:
            return torch == self.pins["torch"]
        if self.kind == "rocm":
            return local.startswith("rocm")
        if self.kind == "ascend":
            return not local.startswith(("cu", "rocm"))
        return self.kind != "cuda" or not local.startswith(("cpu", "rocm"))


def look(root: Path = Path("/")) -> Signals:
    """Read device nodes, kernel modules and installed packages; start nothing."""
    return Signals(
        linux=sys.platform == "linux",
        nvidia=(root / "proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
        amd=(root / "dev/kfd").exists() and (root / "sys/module/amdgpu").exists(),
        ascend=any((root / "dev").glob("davinci*")) or shutil.which("npu-smi") is not None,
        cann=DRIVERS.toolkit_version(VENDORS.ASCEND.machine, root),
        present=_present(),
    )


def _present() -> dict[str, str]:
    present: dict[str, str] = {}
    for distribution in metadata.distributions():
        # Python imports the first of a name on the path.
        present.setdefault(_normal(distribution.metadata["Name"] or ""), distribution.version)
    return present


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def choose_torch(signals: Signals, kind: str, pinned: Mapping[str, str]) -> TorchChoice:
    """Decide without touching anything. `kind`: ANYCHIP_TORCH; `pinned`: the versions of constraints.txt.

    Raises InstallError for an unknown kind, for a CANN that no torch-npu fits, and for nothing to keep.
    """
    if kind not in KINDS:
        raise InstallError(f"ANYCHIP_TORCH={kind} is not known: use one of {', '.join(KINDS)}.")
    saw = f"ANYCHIP_TORCH={kind}"
    if kind == "auto":
        kind, saw = _recognise(signals)
    pins = {name: pinned[name] for name in ("torch", "torchvision")}
    if kind == "keep":
        kept = _kept(signals.present)
        return TorchChoice(kind, saw, kept, constraints=_beside(kept))
    if kind == "ascend":
        torch, plugin = _ascend_pair(signals.cann)
        named, constraints = {"torch": torch, "torch-npu": plugin}, VENDORS.ASCEND.machine.constraints
        if sys.version_info >= NO_NUMPY_1:
            if signals.cann.startswith("8."):
                raise InstallError(
                    f"CANN {signals.cann} needs numpy 1, which has no packages for Python 3.13 and later: use an older "
                    "Python, as in: make PYTHON=python3.11."
                )
            constraints = ()
        return TorchChoice(kind, saw, named, "cpu", ("ascend",), constraints=constraints)
    if kind == "rocm":
        return TorchChoice(kind, saw, pins, "rocm", ("cpu", "rocm"))
    if kind == "cuda":
        return TorchChoice(kind, saw, pins, "", ("cpu",), "cuda")
    # Elsewhere than on Linux the registry's build is already one without CUDA.
    return TorchChoice(kind, saw, pins, "cpu" if kind == "cpu" and signals.linux else "", ("cpu",))


def _recognise(signals: Signals) -> tuple[str, str]:
    torch = signals.present.get("torch", "")
    if torch and (VENDOR_BUILD.search(torch) or VENDOR_PLUGINS & signals.present.keys()):
        return "keep", "a vendor's torch"
    for kind, seen, saw in (
        ("cuda", signals.nvidia, "an NVIDIA driver"),
        ("ascend", signals.ascend, f"an Ascend NPU with {f'CANN {signals.cann}' if signals.cann else 'no CANN'}"),
        ("rocm", signals.amd, "an AMD GPU"),
    ):
        if seen:
            return kind, saw
    return "cpu", "no accelerator"


def _kept(present: Mapping[str, str]) -> dict[str, str]:
    if "torch" not in present:
        raise InstallError(f"ANYCHIP_TORCH=keep needs a torch in {sys.executable}: install the vendor's first.")
    # numpy too: torch is compiled against one major version of it.
    return {name: present[name] for name in present if name.startswith("torch") or name in ("numpy", "triton")}


def _beside(kept: Mapping[str, str]) -> tuple[str, ...]:
    """Return the packages that must be older beside the kept ones: numpy 1 needs its own version of OpenCV."""
    if not kept.get("numpy", "").startswith(("0.", "1.")):
        return ()
    return tuple(line for line in VENDORS.NUMPY_1 if not line.startswith("numpy"))


def torchvision_build(present: Mapping[str, str]) -> str:
    """Return the build on PyTorch's index whose torchvision fits the kept torch; empty: install none.

    A vendor's image may bring torch without torchvision, as Ascend's do. Operators of torchvision are compiled against
    one build of torch: the registry's are for CUDA, and beside torch 2.10.0+cpu importing them fails with "operator
    torchvision::nms does not exist" (pytorch/vision#9085). Raises InstallError if PyTorch's index has no such build.
    """
    if "torchvision" in present:
        return ""
    local = present["torch"].partition("+")[2]
    if not local:
        return ""  # The registry's own build of torch: the registry's torchvision fits.
    if re.fullmatch(r"cpu|cu\d+|rocm\d+(\.\d+)*|xpu", local):
        return local
    raise InstallError(
        f"torch {present['torch']} is a vendor's build without its torchvision, and no public one fits it: "
        "install the vendor's torchvision first."
    )


def torchvision_of(torch: str) -> str:
    """Return torchvision's version for a torch, in pip's form: 2.10.0+cpu -> 0.25.* (README of pytorch/vision)."""
    major, minor = torch.partition("+")[0].split(".")[:2]
    if major != "2":
        raise InstallError(f"No torchvision is known to fit torch {torch}: install it yourself.")
    return f"0.{int(minor) + 15}.*"


def _ascend_pair(cann: str) -> tuple[str, str]:
    """Return the newest torch and torch-npu that Huawei pairs with a CANN; without a CANN, those of the newest."""
    line = ".".join(cann.split(".")[:2]) or next(iter(CANN_PAIRS))
    if line not in CANN_PAIRS:
        raise InstallError(
            f"No torch-npu is known to fit CANN {cann} (only {', '.join(CANN_PAIRS)}): "
            "install torch and torch-npu yourself, then set ANYCHIP_TORCH=keep."
        )
    return CANN_PAIRS[line]


def read_pins(constraints: str) -> dict[str, str]:
    """Read the `name==version` lines of a constraints file that hold on every Python, by normalised name."""
    lines = re.findall(r"^([\w.-]+)==([^\s;#]+)\s*(?:#.*)?$", constraints, re.MULTILINE)
    return {_normal(name): version for name, version in lines}


def with_pins(constraints: str, pins: Mapping[str, str], others: Sequence[str] = ()) -> str:
    """Return the constraints with every line about a package of `pins` and `others` replaced.

    torch settles the version of torchvision. `others`: lines such as `numpy<2`; a pin of the same package wins.
    """
    about = {_normal(re.split(r"[<>=!~]", line)[0]): line for line in others}
    settled = {*pins, *about, "torch", "torchvision"}
    lines = [line for line in constraints.splitlines() if _normal(line.partition("==")[0]) not in settled]
    lines += [line for name, line in about.items() if name not in pins]
    lines += [f"{name}=={version}" for name, version in sorted(pins.items())]
    return "\n".join(lines) + "\n"


def find_build(python: Path | str, index: str, build: str, version: str, timeout_s: float = 5) -> str:
    """Find the local version (`cpu`, `rocm7.2`) of torch `version` on `index` that starts with `build`; empty: none.

    pip itself asks, so that proxies, certificates and wheel tags count as they will in the installation.
    """
    folder = index if build == "rocm" else f"{index}/{build}"  # the folder above lists the builds of every ROCm
    ask = [str(python), "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
    ask += ["--index-url", folder, "--timeout", str(max(1, round(timeout_s))), "--retries", "0"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=3 * timeout_s, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""
    # A registry of pip's own settings answers, too: only the exact local version proves this index.
    found = re.findall(rf"(?<![\w.]){re.escape(version)}\+({re.escape(build)}[\w.]*)", answer)
    return max(found, key=lambda tag: [int(number) for number in re.findall(r"\d+", tag)], default="")


def make_venv(folder: Path, borrow_pip: bool = False) -> Path:
    """Make the environment if there is none, and return its Python.

    With `borrow_pip` it may have no pip of its own if this Python has no ensurepip: vendors' images often
    lack it, and `link_packages` lends their pip.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    works = [str(python), "-m", "pip", "--version"]
    if python.exists() and subprocess.run(works, capture_output=True, check=False).returncode == 0:
        return python
    with_pip = importlib.util.find_spec("ensurepip") is not None
    if not with_pip and not (borrow_pip and importlib.util.find_spec("pip")):
        raise InstallError("This Python makes no virtual environments: install the package python3-venv and try again.")
    # Clear only an environment: the folder could be anything.
    venv.create(folder, with_pip=with_pip, symlinks=os.name != "nt", clear=(folder / "pyvenv.cfg").exists())
    return python


def link_packages(python: Path) -> None:
    """Let the environment see the packages of the running Python, which need not be the system's (/opt/venv, conda)."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and Path(path) != site]
    (site / "kept_torch.pth").write_text("\n".join(folders) + "\n")


def installed_torch(python: Path) -> str:
    """Return the version of torch that an environment has; empty: none."""
    ask = "from importlib import metadata as m; print(next((d.version for d in m.distributions(name='torch')), ''))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def cuda_of(python: Path) -> str:
    """Return the CUDA version for which an environment's torch was built; empty: no torch, or none for CUDA."""
    ask = (
        "import importlib.util as u, pathlib, runpy; found = u.find_spec('torch'); "
        "file = pathlib.Path(found.origin).parent / 'version.py' if found and found.origin else None; "
        "print((runpy.run_path(str(file)).get('cuda') if file and file.exists() else '') or '')"
    )
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def requirements(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """Return the needs of a project with these extras, without itself; for packages in `plugins/`, their needs."""
    found: list[str] = []
    for line in named_by(project, extras):
        own = _plugin_of(line)
        found += read_project(PLUGINS / own)["dependencies"] if own else [line]
    return [line for line in dict.fromkeys(found) if line.partition("==")[0] != project["name"]]


def _plugin_of(line: str) -> str:
    """Return the folder in `plugins/` of a requirement; empty for a package that is not ours."""
    found = re.fullmatch(r"anychip-(\w+)(==.+)?", line)
    return found[1] if found else ""


def named_by(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """Return the requirements that a project names for itself and these extras. An extra may name other extras."""
    optional: Mapping[str, Sequence[str]] = project.get("optional-dependencies", {})
    found = list(project["dependencies"])
    waiting = [extra for extra in extras if extra]
    while waiting:
        extra = waiting.pop(0)
        if extra not in optional:
            raise InstallError(f"There is no extra '{extra}': there is {', '.join(sorted(optional))}.")
        for line in optional[extra]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[([\w,\s-]+)\]", line)
            waiting += re.split(r"\s*,\s*", own[1]) if own else []
            found += [] if own else [line]
    return list(dict.fromkeys(found))


def read_project(folder: Path = ROOT) -> dict[str, Any]:
    """Read the table `project` of a folder's pyproject.toml."""
    # Python 3.10 has no tomllib; pip brings a copy.
    module = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
    found: dict[str, Any] = module.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def install(
    folder: Path, developer: bool, environ: Mapping[str, str], copy: bool = False, dependencies: bool = False
) -> None:
    """Fill the environment in `folder`. `copy`: it needs these sources no longer; `dependencies`: it gets everything
    but anychip itself. Raises InstallError; pip has then said more.
    """
    constraints = (ROOT / "constraints.txt").read_text()
    kind = environ.get("ANYCHIP_TORCH") or "auto"
    index = (environ.get("ANYCHIP_TORCH_INDEX") or INDEX).rstrip("/")
    choice = choose_torch(look(), kind, read_pins(constraints))
    python = make_venv(folder, borrow_pip=choice.kind == "keep")
    if choice.kind == "keep":
        link_packages(python)
    pins, build = dict(choice.pins), ""
    present = installed_torch(python)
    if choice.kind == "ascend" and present and cuda_of(python):
        # torch_npu ends the process beside a CUDA build. The version may not show it: the registry's build has no tag.
        run_pip([str(python), "-m", "pip", "uninstall", "--yes", "torch", "torchvision"])
        present = ""
    if choice.accepts(present):
        pins["torch"], takes = present, f"torch {present}, which is already here"
    else:
        build = find_build(python, index, choice.build, pins["torch"]) if choice.build else ""
        if choice.build == choice.kind == "cpu" and not build and platform.machine() == "aarch64":
            pins.update(ARM_WITHOUT_CUDA)
        pins["torch"] += f"+{build}" if build else ""
        takes = f"torch {pins['torch']} of {index if build else 'the registry'}"
        if choice.build and not build:
            takes += f", since {index} did not answer with a {choice.build} build"
    print(f"anychip: saw {choice.saw}; takes {takes}.", flush=True)
    more = developer or bool(environ.get("ANYCHIP_EXTRAS"))
    print(f"anychip: {what_it_loads(choice.kind, pins['torch'], pins['torch'] == present, more)}", flush=True)

    settled = folder / "constraints.txt"
    settled.write_text(with_pins(constraints, pins, choice.constraints))
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--constraint", str(settled)]
    hashes = environ.get("ANYCHIP_HASHES") or ""
    if hashes and dependencies and choice.kind != "keep":  # A base with torch has its own versions.
        # First, so that torch's other dependencies are there already.
        without = [part for part in pip if part not in ("--constraint", str(settled))]
        run_pip([*without, "--require-hashes", "--no-deps", "--requirement", hashes])
    if not choice.accepts(present):
        if present and present != pins["torch"]:  # To pip, 2.0+cpu satisfies 2.0.
            run_pip([str(python), "-m", "pip", "uninstall", "--yes", "torch", "torchvision"])
        if choice.kind == "ascend" and not build:
            _only_without_cuda(python, pip, pins["torch"], index)
        if choice.kind != "keep":
            run_pip([*pip, *(["--extra-index-url", f"{index}/{build}"] if build else []), "torch", "torchvision"])
    if choice.kind == "keep" and (build := torchvision_build(choice.pins)):
        # From that index alone: the registry's torchvision of the same number would satisfy pip as well. Its other
        # dependencies (numpy, Pillow) come with anychip.
        run_pip([*pip, "--index-url", f"{index}/{build}", "--no-deps", f"torchvision=={torchvision_of(pins['torch'])}"])
    named = [extra for extra in re.split(r"[\s,]+", environ.get("ANYCHIP_EXTRAS") or "") if extra]
    extras = ",".join(dict.fromkeys((*choice.extras, *named, *(["dev"] if developer else []))))
    link = [] if copy else ["--editable"]
    if dependencies:
        # An image names its extras itself: the extras of a kind of torch on a host are not added.
        run_pip([*pip, *requirements(read_project(), named)])
        return
    # Together, as pip would look for anychip elsewhere. A package with more needs (gRPC) comes if an extra names it.
    wanted = {_plugin_of(line) for line in (*BROUGHT, *named_by(read_project(), extras.split(",")))}
    brought = [word for each in sorted(PLUGINS.iterdir()) if each.name in wanted for word in (*link, str(each))]
    there = {each.name.partition("-")[0] for each in folder.glob("lib/python*/site-packages/*.dist-info")}
    if old := [name for name in TAKEN_IN if name.replace("-", "_") in there]:
        run_pip([str(python), "-m", "pip", "uninstall", "--yes", *old])
    run_pip([*pip, *link, f"{ROOT}[{extras}]" if extras else str(ROOT), *brought])
    if developer:
        # ultralytics brings opencv-python: its files lie over the headless build's and need a desktop's libraries.
        run_pip([*pip, "--force-reinstall", "--no-deps", "opencv-python-headless"])
    if choice.optional_extra:
        try:
            run_pip([*pip, *link, f"{ROOT}[{choice.optional_extra}]"])
        except InstallError:
            if kind != "auto":
                raise
            print(f"anychip: goes on without its extra '{choice.optional_extra}': see above.", flush=True)


def what_it_loads(kind: str, torch: str, here: bool, more: bool = False) -> str:
    """Return what to say before pip begins: how much it may load with this torch.

    `here`: that torch is there already; `more`: development or an extra wants packages too. What was not measured is
    named without a size: PyTorch's own builds, vendors' packages, and these.
    """
    beside, remedy = ["what development and extras need"] if more else [], ""
    if here or kind == "keep":
        size = f"{BESIDE_TORCH_GB} GB"
    elif "+" in torch or kind == "ascend" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        size = f"{BESIDE_TORCH_GB} GB"
        beside.insert(0, f"torch {torch}")
    else:
        size = f"{WITH_CUDA_GB} GB, most of it CUDA's libraries"
        if kind == "cuda":
            beside.insert(0, "TensorRT")
        else:
            remedy = f" A CPU build needs none of them: name a mirror of {INDEX} in ANYCHIP_TORCH_INDEX."
    others = f", and beside it {' and '.join(beside)}" if beside else ""
    return f"It loads up to {size}{others}.{remedy}"


def _only_without_cuda(python: Path, pip: Sequence[str], torch: str, index: str) -> None:
    """Install the registry's build of torch; refuse it if it is for CUDA, as on x86-64. Raises InstallError.

    Alone: the needs of a build for CUDA are gigabytes.
    """
    run_pip([*pip, "--no-deps", f"torch=={torch}"])
    if cuda := cuda_of(python):
        run_pip([str(python), "-m", "pip", "uninstall", "--yes", "torch"])
        raise InstallError(
            f"torch_npu needs a CPU build of torch {torch}: {index} did not answer with one, and the registry's is for "
            f"CUDA {cuda}. Try again, or name a mirror of that index in ANYCHIP_TORCH_INDEX."
        )


def run_pip(command: Sequence[str]) -> None:
    """Run an installation. Raises InstallError."""
    if subprocess.run(command, check=False).returncode:
        raise InstallError("pip could not install everything: see its last lines above, then try again.")


def main() -> None:
    """Run the command line; example: python3 deploy/install.py --dev .venv."""
    parser = argparse.ArgumentParser(description="Make or renew the virtual environment of anychip.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv", help="the environment (default: .venv)")
    parser.add_argument("--dev", action="store_true", help="add what lint, types and tests need")
    parser.add_argument("--copy", action="store_true", help="copy anychip into it instead of linking these sources")
    parser.add_argument("--dependencies", action="store_true", help="only what anychip needs, for a layer of its own")
    options = parser.parse_args()
    try:
        install(options.folder, options.dev, os.environ, options.copy, options.dependencies)
    except InstallError as error:
        sys.exit(f"anychip: {error}")


if __name__ == "__main__":
    main()
