"""The service on the null device, as in tests/service."""

from tests.support.null_service import serve

__all__ = ["serve"]
