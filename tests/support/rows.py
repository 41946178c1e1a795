"""Rows of made-up vendors, for engines."""

from __future__ import annotations

from typing import Any

from backends.vendors.table import Facts


def row(*precisions: str, device_type: str = "cpu", **facts: Any) -> Facts:
    """Make a vendor whose devices compute in these precisions."""
    return Facts(vendor="test", device_type=device_type, engines=(), precisions=precisions, **facts)
