"""The service without its counters, for benchmarks.observability: what counting costs.

    python -m benchmarks.uncounted serve …

Owns: switching them off. Must not be a setting: a service that counts nothing shows nothing of its faults.
"""

from __future__ import annotations

import sys
from functools import partialmethod


def main() -> int:
    """The command."""
    from app import cli
    from app.observability.metrics import Metrics

    Metrics.__init__ = partialmethod(Metrics.__init__, enabled=False)  # type: ignore[assignment, method-assign]
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
