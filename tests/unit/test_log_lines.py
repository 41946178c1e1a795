"""A client writes no log line of its own, and moves no terminal's cursor."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.logs import JsonFormatter, TextFormatter


def record(path: str) -> logging.LogRecord:
    made = logging.LogRecord("anychip", logging.INFO, "", 0, "request", None, None)
    made.fields = {"path": path}
    return made


@pytest.mark.parametrize("path", ["/a\n2026-11-22 INFO forged", "/\x1b[2J\x1b[H", "/a\r", "/\u2028x", "/\x9b1m"])
def test_a_path_stays_in_its_line(path: str) -> None:
    line = TextFormatter().format(record(path))
    assert len(line.splitlines()) == 1
    assert line.isprintable()


@given(st.text())
def test_whatever_a_client_sends_is_one_line(path: str) -> None:
    assert TextFormatter().format(record(path)).isprintable()
    line = JsonFormatter().format(record(path.encode("utf-8", "replace").decode()))
    assert "\n" not in line
    assert json.loads(line)["message"] == "request"
