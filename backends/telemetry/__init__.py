"""What vendors' tools say of their devices: utilisation, power, energy, temperature.

Owns: one module a tool (a pure `parse` and a `read` that runs it), the thread that samples, the limits on what it runs.
Must not be on the request path, and knows nothing of torch's device numbers: indexes are the tool's own, which differ
from torch's where a visibility variable hides devices. An adapter maps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from backends.backend import Telemetry
from backends.telemetry import amd, ascend, biren, cambricon, hygon, intel, moorethreads, nvidia
from backends.telemetry.sampler import Sampler
from backends.telemetry.tool import Tool, ToolError

READERS: Mapping[str, Callable[[Tool], Mapping[int, Telemetry]]] = {
    "nvidia": nvidia.read,
    "ascend": ascend.read,
    "amd": amd.read,
    "hygon": hygon.read,
    "cambricon": cambricon.read,
    "biren": biren.read,
    "moorethreads": moorethreads.read,
    "intel": intel.read,
}


def sampler(vendor: str, interval_s: float = 5.0, limit_s: float = 10.0) -> Sampler:
    """A sampler over the vendor's tool, each run of which may take `limit_s`. Cheap: nothing runs before `latest`.

    `vendor` is a key of READERS; raises KeyError for another. The caller closes it.
    """
    read, tool = READERS[vendor], Tool(limit_s)
    return Sampler(lambda: read(tool), interval_s, cancel=tool.close)


__all__ = ["READERS", "Sampler", "Tool", "ToolError", "sampler"]
