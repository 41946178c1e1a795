"""Make or renew a virtual environment with NVIDIA's tritonclient, which the tests run against the service.

Owns: what is in it. An environment of its own because tritonclient wants an older protobuf (< 7) and ml-dtypes than
anychip is tested with, and because that is how clients live. Used by tests/service/test_tritonclient.py; example:
python3 tests/environments/triton_environment.py .venv-triton
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.install import make_venv  # noqa: E402

TRITONCLIENT = "2.73.0"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make or renew the environment in which tests run tritonclient.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv-triton", help="default: .venv-triton")
    python = make_venv(parser.parse_args().folder)
    package = f"tritonclient[http,grpc]=={TRITONCLIENT}"
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", package]
    if subprocess.run(command, check=False).returncode:
        sys.exit("anychip: pip could not install tritonclient: see its last lines above, then try again.")


if __name__ == "__main__":
    main()
