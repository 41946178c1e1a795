"""Telemetry of devices from vendors' tools. Their indexes are the tool's own, not torch's numbers of devices."""

from backends.telemetry.sampling import Sampler, Tool, ToolError

__all__ = ["Sampler", "Tool", "ToolError"]
