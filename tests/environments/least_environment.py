"""Make or renew the environment of the tests with least versions: it sees the packages of the one that runs this, and
has those that pyproject.toml names in the least versions that it admits.

Owns: which packages these are. torch stays, and what is built for one of its versions. Used by the suite least;
example: .venv/bin/python tests/environments/least_environment.py .venv-least
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.install import InstallError, link_packages, make_venv, named_by, read_project, run_pip  # noqa: E402
from tests.environments.command import run  # noqa: E402

EXTRAS = ("timm",)
STAY = ("torch", "torchvision", "numpy", "opencv-python-headless")
"""An older NumPy wants older builds of all that is compiled for it, and an older torch is gigabytes."""


def least_versions() -> dict[str, str]:
    """Return the version of each package that is installed so, as pyproject.toml states it. Raises InstallError."""
    project, found = read_project(), {}
    for line in named_by(project, EXTRAS):
        stated = re.fullmatch(r"([\w.-]+(?:\[[\w,]+\])?)>=([\d.]+)(?:;.*)?", line.replace(" ", ""))
        if not stated:
            raise InstallError(f"pyproject.toml states no least version in {line!r}.")
        if stated[1] not in STAY:
            found[stated[1]] = stated[2]
    return found


def make(folder: Path) -> None:
    """Fill the environment in `folder`. Raises InstallError."""
    python = make_venv(folder)
    link_packages(python)
    # What they need may be older too, and nothing of what stays may be.
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={metadata.version(name)}\n" for name in STAY))
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--constraint", str(constraints)]
    run_pip([*pip, *(f"{name}=={version}" for name, version in least_versions().items())])
    # Linked packages do not see what is linked to them: these sources are put here, too.
    ours = [word for folder in (ROOT, ROOT / "plugins" / "grpc") for word in ("--editable", str(folder))]
    run_pip([*pip, "--no-deps", "--no-build-isolation", *ours])


if __name__ == "__main__":
    run(make, "the environment of the tests with least versions", ROOT / ".venv-least")
