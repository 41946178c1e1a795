"""The installed `anychip` command.

Owns: its first lines. Must not import anything before the path is settled.
"""

import io
import os
import pkgutil
import sys

from anychip_base import interpreter

_PREPARED, _MAIN = "app.prepared:prepared", "app.cli:main"  # By their names: nothing here imports what lies above.


def main() -> int:
    """Run a command of the command line; return the exit code, 130 for one that Ctrl-C ended while it was imported."""
    try:
        interpreter.settle()
        _keep_output()
        with pkgutil.resolve_name(_PREPARED)(sys.argv[1:]):
            return int(pkgutil.resolve_name(_MAIN)())
    except KeyboardInterrupt:
        return interpreter.INTERRUPTED


def _keep_output() -> None:
    """Keep standard output for what Python prints; descriptor 1 becomes standard error, here and in child processes.

    Compilers and drivers print there from C++, as PyTorch's exporter does the graph of a network: that would be in the
    middle of a JSON answer.
    """
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and sys.stderr is not None:  # Either may be closed.
        raw = os.fdopen(os.dup(out.fileno()), "wb")
        sys.stdout = io.TextIOWrapper(
            raw, out.encoding, out.errors, line_buffering=out.line_buffering, write_through=out.write_through
        )
        os.dup2(sys.stderr.fileno(), out.fileno())
