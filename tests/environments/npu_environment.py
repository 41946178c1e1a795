"""Make or renew a second virtual environment, in which Huawei's own torch_npu runs over a stub driver.

Owns: which versions fit each other there, and that its torch is a CPU build, beside which alone torch_npu works. Used
by tests/simulated/test_stub_drivers.py; example: python3 tests/environments/npu_environment.py .venv-npu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.install import INDEX, InstallError, find_build, make_venv, run_pip, with_pins  # noqa: E402
from tests.environments.command import run  # noqa: E402

TORCH, TORCH_NPU, TORCHVISION = "2.13.0", "2.13.0", "0.28.0"
_PLUGIN = ("--editable", str(ROOT / "plugins" / "ascend"))
_TESTS = ("pytest", "pytest-asyncio", "pytest-timeout")
# Reads files only: a CUDA build may lack the libraries that importing it needs.
_ASK = (
    "import importlib.util as u, json, pathlib, runpy; spec = u.find_spec('torch'); "
    "read = lambda: runpy.run_path(str(pathlib.Path(spec.origin).with_name('version.py'))); "
    "print(json.dumps([str(read()['__version__']), read()['cuda']] if spec else ['', None]))"
)


def make(folder: Path) -> None:
    """Fill the environment in `folder`. Raises InstallError."""
    python = make_venv(folder)
    constraints = folder / "constraints.txt"
    pip = [str(python), "-m", "pip"]
    add = [*pip, "install", "--disable-pip-version-check", "--constraint", str(constraints)]

    version, cuda = _torch(python)
    if version.partition("+")[0] != TORCH or cuda is not None:
        index = (os.environ.get("ANYCHIP_TORCH_INDEX") or INDEX).rstrip("/")
        build = find_build(python, index, "cpu", TORCH)
        wanted = f"{TORCH}+{build}" if build else TORCH
        _settle(constraints, wanted)
        # Alone: a build for CUDA, which will not do, would bring gigabytes of libraries.
        run_pip([*add, "--no-deps", *(["--extra-index-url", f"{index}/{build}"] if build else []), f"torch=={wanted}"])
        version, cuda = _torch(python)
        if cuda is not None:
            run_pip([*pip, "uninstall", "--yes", "torch"])
            raise InstallError(
                f"torch_npu needs a CPU build of torch {TORCH}, and only one for CUDA {cuda} was found: name an index "
                "that has it in ANYCHIP_TORCH_INDEX."
            )
    _settle(constraints, version)
    # They ask for torch builds and packages that nothing here uses.
    run_pip([*add, "--no-deps", f"torch_npu=={TORCH_NPU}", f"torchvision=={TORCHVISION}"])
    # torch again: it was installed without what it needs.
    run_pip([*add, f"torch=={version}", "--editable", str(ROOT), *_PLUGIN, "pyyaml", *_TESTS])


def _settle(constraints: Path, torch: str) -> None:
    ours = (ROOT / "constraints.txt").read_text()
    constraints.write_text(with_pins(ours, {"torch": torch, "torchvision": TORCHVISION}))


def _torch(python: Path) -> tuple[str, str | None]:
    version, cuda = json.loads(subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True).stdout)
    return version, cuda


if __name__ == "__main__":
    run(make, "the environment in which tests run torch_npu", ROOT / ".venv-npu")
