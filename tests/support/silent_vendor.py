"""Plugin for workers: the null device's queries fail, like vendors' with a busy driver."""

from anychip_tools.null.backend import NullBackend


def _fails(self, device):
    raise RuntimeError(f"the driver of {device} is busy")


setattr(NullBackend, "memory", _fails)  # noqa: B010 - a type checker need not like it.
setattr(NullBackend, "telemetry", _fails)  # noqa: B010
