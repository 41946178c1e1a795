"""Telemetry of devices from vendors' tools: utilisation, power, energy, temperature.

Owns: the tools (a row of `tools`, or a module with `read` if a row does not suffice), the thread that samples, the
limits on its commands. Must not be on the request path, and knows nothing of torch's device numbers: indexes are the
tool's own, which differ from torch's if a visibility variable hides devices. An adapter maps them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial

from backends.contract.backend import Telemetry
from backends.telemetry.sampler import Sampler
from backends.telemetry.tool import Tool, ToolError
from backends.telemetry.tools import TOOLS, read


def reader(name: str) -> Callable[..., Mapping[int, Telemetry]]:
    """Return `read(tool)` for the name in a vendor's row: a tool, a module here, or a dotted name of another's.

    It may have a parameter `wanted`: the numbers of the devices to ask for, none for all.

    Raises ImportError.
    """
    if name in TOOLS:
        return partial(read, TOOLS[name])
    module = importlib.import_module(name if "." in name else f"{__name__}.{name}")
    of_module: Callable[..., Mapping[int, Telemetry]] = module.read
    return of_module


def sampler(name: str, interval_s: float = 5.0, limit_s: float = 10.0) -> Sampler:
    """Return a sampler over a vendor's tool, each run within `limit_s`. Cheap: nothing runs before `latest`.

    `name`: as `reader` takes it; raises ImportError for another. The caller closes it.
    """
    return Sampler(reader(name), Tool(limit_s), interval_s)


__all__ = ["Sampler", "Tool", "ToolError", "reader", "sampler"]
