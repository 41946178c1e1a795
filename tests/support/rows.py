"""Rows of made-up vendors, for engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.vendors.table import Facts

if TYPE_CHECKING:
    from backends.engines import Engine


def row(*precisions: str, device_type: str = "cpu", **facts: Any) -> Facts:
    return Facts(vendor="test", device_type=device_type, engines=(), precisions=precisions, **facts)


def engines_by_name() -> dict[str, type[Engine]]:
    """Return our engines, and those that backends bring. It looks for all backends, which not every test may."""
    from backends import BACKENDS
    from backends.engines import ENGINES
    from backends.vendors.torch_device import TorchBackend

    brought = [kind for each in BACKENDS if isinstance(each, TorchBackend) for kind in each.hooks.engines]
    return {**ENGINES, **{kind.name: kind for kind in brought}}
