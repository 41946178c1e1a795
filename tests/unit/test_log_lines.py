"""Log lines are readable by machines and people. A client writes none of its own, and moves no terminal's cursor."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anychip_tools import predict
from app import logs
from app.access import audit
from app.logs import AUDIT, JsonFormatter, TextFormatter


def record(path: str) -> logging.LogRecord:
    made = logging.LogRecord("anychip", logging.INFO, "", 0, "request", None, None)
    made.fields = {"path": path}
    return made


@given(st.text())
def test_whatever_a_client_sends_is_one_line(path: str) -> None:
    assert TextFormatter().format(record(path)).isprintable()
    line = JsonFormatter().format(record(path.encode("utf-8", "replace").decode()))
    assert "\n" not in line
    assert json.loads(line)["message"] == "request"


def refuse(times: int, model: str = "m", key: str = "", outcome: str = "FORBIDDEN") -> None:
    for _ in range(times):
        audit.record(
            "unload", {"model": model}, key=key, address="::1", weights_sha256="", outcome=outcome, seconds=0.0
        )


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(audit, "record", audit.Audit().record)
    monkeypatch.setattr("app.clock.monotonic", lambda: 100.0)  # Else a slow machine lets more lines in meanwhile.
    monkeypatch.setattr(logging.getLogger(AUDIT), "propagate", True)
    caplog.set_level(logging.INFO, AUDIT)
    return caplog


def test_strangers_do_not_fill_the_audit(audited: pytest.LogCaptureFixture) -> None:
    refuse(5000, "x" * 60_000)
    text = "".join(JsonFormatter().format(each) for each in audited.records)
    assert len(text) < 600_000
    written = len(audited.records)
    refuse(1, key="ops", outcome="OK")
    fields = audited.records[-1].__dict__["fields"]
    assert (fields["key"], fields["left_out"] + written) == ("ops", 5000)
    refuse(1, key="ops", outcome="OK")
    assert "left_out" not in audited.records[-1].__dict__["fields"]


def test_what_changed_something_is_always_in_the_audit(audited: pytest.LogCaptureFixture) -> None:
    refuse(3000, outcome="OK")
    refuse(3000, key="ops", outcome="MODEL_NOT_FOUND")
    assert len(audited.records) == 6000


@given(st.text())
def test_labels_move_no_terminals_cursor(label: str) -> None:
    found = {"width": 1, "height": 1, "classes": [{"label": label, "class_id": 0, "score": 0.5}]}
    with pytest.MonkeyPatch.context() as patched:
        lines: list[str] = []
        patched.setattr("builtins.print", lambda line, **_: lines.append(line))
        predict._print_prediction(label, found)
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=stream))
    yield stream
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def test_a_line_for_machines_is_one_json_object(written: io.StringIO) -> None:
    logs.configure("info", "json")
    token = logs.request_id.set("abc")
    try:
        logging.getLogger("anychip.test").warning("umlaut \u00e4,\n%s", 'quote "', extra={"worker": "npu:0#1"})
    finally:
        logs.request_id.reset(token)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("anychip.test").exception("it failed", extra={"fields": {"ms": 3}})
    logging.getLogger("anychip.test").debug("too fine")
    first, second = map(json.loads, written.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning",
        "logger": "anychip.test",
        "message": 'umlaut \u00e4,\nquote "',
        "request_id": "abc",
        "worker": "npu:0#1",
    }
    assert second["ms"] == 3
    assert "request_id" not in second
    assert "ValueError: broken" in second["exception"]
