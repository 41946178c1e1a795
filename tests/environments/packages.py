"""Debian's packages, unpacked into a folder instead of installed: of another release or for another processor.

Owns: apt's files beside the system's. Used by clients_environment.py and arm_environment.py; needs apt.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def unpacked(place: Path, release: str, packages: Sequence[str], architecture: str = "") -> Path:
    """Unpack `packages` from this machine's mirror into a folder; for another `architecture` (`arm64`), also what
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
