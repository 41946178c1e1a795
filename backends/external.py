"""Backends of other packages: entry points of the group `anychip.backends` (docs/new-backend.md).

Owns: finding and making them, and a substitute for one that cannot be made. Must not import a vendor's own package:
neither must they, until a network is loaded.
"""

from __future__ import annotations

from anychip_base.extras import entry_points
from backends.contract.backend import Backend
from backends.contract.choice import AbsentBackend
from backends.contract.errors import first_line
from backends.vendors import table as vendors
from backends.vendors.table import Facts

GROUP = "anychip.backends"


def external_backends() -> tuple[Backend, ...]:
    """Return the backends of other packages, by name; cannot raise. One may have our name for its vendor.

    One that cannot be made is in the list, too, unavailable, with the reason.
    """
    taken = {row.name: row.vendor for row in vendors.ACCELERATORS} | {vendors.CPU.name: ""}
    found = {(entry.name, entry.value): entry for entry in entry_points(GROUP)}
    backends: list[Backend] = []
    for _, entry in sorted(found.items()):
        try:
            made = entry.load()
            backend = made() if callable(made) else made
            if not isinstance(backend, Backend):
                raise TypeError(f"{entry.value} makes no backends.Backend")
            if taken.get(backend.name, backend.facts.vendor) != backend.facts.vendor:
                raise ValueError(f"there is another backend called {backend.name}")
        except Exception as error:  # The code of another package must not end the service.
            name = entry.name
            row = Facts(vendor=name, device_type=name, engines=(), precisions=(), name=name, title=name)
            backend = AbsentBackend(name, row, f"The backend {entry.value} cannot be used: {first_line(error)}.")
        else:
            vendors.learn(backend.facts)
            taken[backend.name] = ""
        backends.append(backend)
    return tuple(backends)
