"""The installed `anychip` command.

Owns: its first lines. Must not import anything before the path is settled.
"""

import pkgutil

from anychip_base import interpreter

_MAIN = "app.cli:main"  # By its name: nothing here imports what lies above.


def main() -> int:
    """Run a command of the command line; return the exit code."""
    interpreter.settle()
    return int(pkgutil.resolve_name(_MAIN)())
