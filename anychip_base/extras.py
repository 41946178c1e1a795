"""Entry points of installed packages; the extras of this project, and the command that installs one here.

Owns: the command at the end of a message. Must not name a package of this project as one of a registry: it is on none,
and anybody could take the name.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

_PROJECT = "anychip"
_PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@cache  # It is read from a file.
def version() -> str:
    """Return the version of the sources that run, or of the installation; "" if both are out of reach."""
    try:
        project = _PYPROJECT.read_text(encoding="utf-8")
    except OSError:  # It is installed without its sources, or this process may not read them.
        return version_of(_PROJECT)
    found = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert found
    return found[1]


def version_of(package: str) -> str:
    """Return the version of an installed package; "" if its metadata is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def entry_points(group: str, name: str | None = None) -> metadata.EntryPoints:
    """Return the entry points of a group, or the one called `name` in it. What is installed is read once."""
    wanted = {"group": group} if name is None else {"group": group, "name": name}
    found: metadata.EntryPoints = _installed(tuple(sys.path)).select(**wanted)
    return found


@cache
def _installed(_path: tuple[str, ...]) -> Any:
    return metadata.entry_points()  # In Python 3.10 of another type.


NOT_INSTALLED = "anychip's own installation is not here, or an older one: make install, in its sources"
"""Message where a part of every installation is missing: the sources run uninstalled, as with PYTHONPATH."""


@cache
def how_to_install(extra: str) -> str:
    """Return a command that installs an extra's requirements, such as `pip install 'onnx>=1.16'`."""
    try:
        requirements = list(dict.fromkeys(_requirements(extra)))
    except metadata.PackageNotFoundError:
        requirements = []
    if not requirements:
        return f"ANYCHIP_EXTRAS={extra} make install, in anychip's sources"
    beside = shutil.which("pip")
    is_ours = beside is not None and os.path.dirname(beside) == os.path.dirname(sys.executable)
    command = f"{'pip' if is_ours else f'{sys.executable} -m pip'} install {shlex.join(requirements)}"
    return f"{command}, in anychip's sources" if any(each.startswith("./") for each in requirements) else command


def _requirements(extra: str) -> Iterator[str]:
    """Yield packages of others, and folders of plug-ins in the sources."""
    for line in metadata.requires(_PROJECT) or ():
        requirement, _, marker = line.partition(";")
        if not re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker):
            continue
        requirement = requirement.strip()
        if plugin := re.fullmatch(rf"{_PROJECT}-(\w+)(==.+)?", requirement):
            yield f"./plugins/{plugin[1]}"
        elif own := re.fullmatch(rf"{_PROJECT}\[([\w,\s-]+)\]", requirement):
            for each in re.split(r"\s*,\s*", own[1]):
                yield from _requirements(each)
        else:
            yield requirement
