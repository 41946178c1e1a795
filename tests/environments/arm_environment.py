"""Make or renew a folder with Python, torch and what anychip wants for ARM, which tests run by qemu.

Owns: what is in it. `bin/python` of the folder starts it, by qemu-user-static (a Debian package). torch is the newest
whose wheel for ARM in the registry is without CUDA. Used by tests/cpu/test_arm.py; example:
python3 tests/environments/arm_environment.py .venv-arm
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.environments.packages import unpacked  # noqa: E402

RELEASE, PYTHON = "bookworm", "3.11"
PACKAGES = ("python3", "libstdc++6", "libgomp1")
TORCH = ("torch==2.10.0", "torchvision==0.25.0")
WANTED_BY_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


def wanted() -> list[str]:
    """Return the dependencies of anychip itself, without torch."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [each for each in project["dependencies"] if not each.startswith("torch")]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make or renew the folder with Python and torch for ARM.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv-arm", help="default: .venv-arm")
    folder = parser.parse_args().folder.absolute()
    emulator = shutil.which("qemu-aarch64-static")
    if emulator is None:
        sys.exit("anychip: qemu-aarch64-static is not here: apt-get install qemu-user-static")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    root = unpacked(folder, RELEASE, PACKAGES, "arm64")
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile"]
    platforms = [part for each in PLATFORMS for part in ("--platform", each)]
    wheels = [*pip, "--target", str(site), *platforms, "--python-version", PYTHON, "--only-binary", ":all:"]
    # One call for all: a second one into the same folder would leave out what folders have in common.
    subprocess.run([*wheels, "--no-deps", *TORCH], check=True)
    pins = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins.write_text("\n".join(line for line in lines if not line.startswith("torch")) + "\n", encoding="utf-8")
    subprocess.run([*wheels, "--upgrade", "--constraint", str(pins), *wanted(), *WANTED_BY_TORCH], check=True)
    if sys.version_info[:2] == tuple(map(int, PYTHON.split("."))):  # Here it takes seconds, there minutes.
        compiled = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(site), f"{root}/usr/lib/python{PYTHON}"]
        subprocess.run(compiled, check=False, stdout=subprocess.DEVNULL)
    python = folder / "bin" / "python"
    python.parent.mkdir()
    # A program that Python starts is this script again: the kernel knows no program of the other processor.
    python.write_text(
        f'#!/bin/sh\nexport PYTHONHOME="{root}/usr" PYTHONPATH="{site}:$PYTHONPATH"\n'
        f'exec {emulator} -L "{root}" -0 "{python}" "{root}/usr/bin/python{PYTHON}" "$@"\n'
    )
    python.chmod(0o755)


if __name__ == "__main__":
    os.umask(0o022)
    main()
