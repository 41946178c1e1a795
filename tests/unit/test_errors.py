"""The table of errors: each code has a status for HTTP and gRPC and a meaning for people."""

from __future__ import annotations

from typing import get_args

from app.errors import GRPC_STATUS, MEANINGS, STATUS, Code


def test_every_code_is_in_every_table() -> None:
    codes = set(get_args(Code))
    assert set(STATUS) == set(GRPC_STATUS) == set(MEANINGS) == codes
