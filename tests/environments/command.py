"""The command line of what makes an environment of the tests.

Owns: its one argument and its message. Must not know what is in an environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from deploy.install import InstallError


def run(make: Callable[[Path], None], about: str, folder: Path) -> None:
    """Make or renew an environment in the folder that the command line names, else in `folder`."""
    parser = argparse.ArgumentParser(description=f"Make or renew {about}.")
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help=f"default: {folder.name}")
    try:
        make(parser.parse_args().folder)
    except InstallError as error:
        sys.exit(f"anychip: {error}")
