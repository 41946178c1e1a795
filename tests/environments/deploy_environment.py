"""Make or renew the environment of the deployment's tests: it sees the packages of the one that runs this, and has Ray
and the tools that check images and charts besides.

Owns: nothing of theirs. Used by the suites deployment and images; example:
.venv/bin/python tests/environments/deploy_environment.py .venv-deploy
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.install import link_packages, make_venv, run_pip  # noqa: E402
from tests.environments.command import run  # noqa: E402


def make(folder: Path) -> None:
    """Fill the environment in `folder`. Raises InstallError."""
    python = make_venv(folder)
    link_packages(python)
    settled = Path(sys.prefix) / "constraints.txt"
    constraints = settled if settled.exists() else ROOT / "constraints.txt"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--constraint", str(constraints)]
    run_pip([*pip, "--editable", f"{ROOT}[deploy]", "--editable", str(ROOT / "plugins" / "hosting")])


if __name__ == "__main__":
    run(make, "the environment of the deployment's tests", ROOT / ".venv-deploy")
