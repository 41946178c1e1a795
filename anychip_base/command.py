"""The installed `anychip` command.

Owns: its first lines. Must not import anything before the path is settled.
"""

import pkgutil
import sys

from anychip_base import interpreter

_PREPARED, _MAIN = "app.prepared:prepared", "app.cli:main"  # By their names: nothing here imports what lies above.


def main() -> int:
    """Run a command of the command line; return the exit code."""
    interpreter.settle()
    with pkgutil.resolve_name(_PREPARED)(sys.argv[1:]):
        return int(pkgutil.resolve_name(_MAIN)())
