"""What vendors' tools say of their devices: utilisation, power, energy, temperature.

Owns: one module a tool (a pure `parse` and a `read` that runs it), the thread that samples, the limits on what it runs.
Must not be on the request path, and knows nothing of torch's device numbers: indexes are the tool's own, which differ
from torch's where a visibility variable hides devices. An adapter maps them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from backends.backend import Telemetry
from backends.telemetry.sampler import Sampler
from backends.telemetry.tool import Tool, ToolError


def reader(name: str) -> Callable[[Tool], Mapping[int, Telemetry]]:
    """`read` of the module that a vendor's row names: one of this package, or a dotted name of somebody else's.

    Raises ImportError.
    """
    module = importlib.import_module(name if "." in name else f"{__name__}.{name}")
    read: Callable[[Tool], Mapping[int, Telemetry]] = module.read
    return read


def sampler(name: str, interval_s: float = 5.0, limit_s: float = 10.0) -> Sampler:
    """A sampler over a vendor's tool, each run of which may take `limit_s`. Cheap: nothing runs before `latest`.

    `name`: as `reader` takes it; raises ImportError for another. The caller closes it.
    """
    read, tool = reader(name), Tool(limit_s)
    return Sampler(lambda: read(tool), interval_s, cancel=tool.close)


__all__ = ["Sampler", "Tool", "ToolError", "reader", "sampler"]
