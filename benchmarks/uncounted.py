"""Service without its counters, for benchmarks.observability, which measures their cost.

    python -m benchmarks.uncounted serve …

Owns: switching them off. Must not be a setting: a service that counts nothing shows nothing of its faults.
"""

from __future__ import annotations

import sys
from typing import Any

from prometheus_client import CollectorRegistry


class _Nothing:
    """Stand-in for every metric and child."""

    def labels(self, *_: str) -> _Nothing:
        return self

    def _ignored(self, *_: Any, **__: Any) -> None: ...

    remove = inc = set = set_function = observe = _ignored


def main() -> int:
    """Run the command."""
    from app import cli
    from app.observability.metrics import TABLE, TELEMETRY, BusiestClients, Metrics
    from app.prepared import prepared

    class NoClients(BusiestClients):
        def count(self, *_: Any, **__: Any) -> None: ...

    def uncounted(self: Any) -> None:
        self.registry, self.clients, nothing = CollectorRegistry(), NoClients(), _Nothing()
        vars(self).update(dict.fromkeys(TABLE, nothing), telemetry=dict.fromkeys(TELEMETRY, nothing))

    Metrics.__init__ = uncounted  # type: ignore[method-assign]
    with prepared(sys.argv[1:]):
        return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
