"""Gather the wheels of an installed environment into a folder, for machines and image builds without a network.

    .venv/bin/python deploy/wheelhouse.py wheelhouse                 # all that this environment runs
    .venv/bin/python deploy/wheelhouse.py wheelhouse --without-torch # for bases that bring a torch of their own
    PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/wheelhouse make install       # over there, from the same sources

Owns: the list of distributions: anychip's dependencies, at the versions installed here, and what pip needs to
install anychip itself. The machine it runs on must have the system, the processor and the Python of the target machine.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deploy.install import read_project, requirements  # noqa: E402

_BUILD = ("setuptools", "wheel", "pip")


def closure(roots: list[str]) -> dict[str, str]:
    """Return the installed versions, by normalised name, of these requirements and all their dependencies."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # It belongs to an extra that is not installed here.
        found[name] = distribution.version
        for extra in ("", *sorted(wanted.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for line in distribution.requires or ():
                requirement = Requirement(line)
                marker = requirement.marker
                if marker is None or marker.evaluate({"extra": extra}):
                    waiting.append(requirement)
    return found


def wanted(extras: str, without_torch: bool) -> list[str]:
    """Return the distributions to gather for pyproject.toml and these of its extras, as `name==version`."""
    found = closure(requirements(read_project(), extras.split(",")))
    if without_torch:
        for name in closure(["torch", "torchvision"]):
            found.pop(name, None)
    # Plug-ins come from the same sources as anychip.
    return sorted(f"{name}=={version}" for name, version in found.items() if not name.startswith("anychip"))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Gather the wheels of this environment into a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--extras", default="cpu,grpc,onnx", help="of anychip, as far as they are installed: %(default)s"
    )
    parser.add_argument("--without-torch", action="store_true", help="leave out torch, torchvision and what they need")
    parser.add_argument(
        "--also",
        nargs="*",
        default=[],
        metavar="REQUIREMENT",
        help="further wheels, e.g. torchvision==0.27.0+cpu for a base that has torch 2.12.0+cpu without torchvision",
    )
    parser.add_argument("--index", default="", help="a further index, such as https://download.pytorch.org/whl/cpu")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(options.folder)]
    download += ["--extra-index-url", options.index] if options.index else []
    packages = [*wanted(options.extras, options.without_torch), *_BUILD, *options.also]
    if subprocess.run([*download, *packages], check=False).returncode:
        sys.exit("anychip: not every wheel could be had: see pip's last lines above.")
    print(f"{len(packages)} distributions are in {options.folder}")


if __name__ == "__main__":
    main()
