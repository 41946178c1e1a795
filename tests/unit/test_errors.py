"""The table of errors: each code has a status for HTTP and gRPC and a meaning for people."""

from __future__ import annotations

from typing import get_args

from app.errors import ERRORS, Code


def test_every_code_is_in_the_table() -> None:
    assert set(ERRORS) == set(get_args(Code))
    assert all(kind.status and kind.grpc and kind.meaning for kind in ERRORS.values())
