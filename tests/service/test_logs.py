"""Log lines: readable by machines and by people, each with its request, none with anything secret."""

from __future__ import annotations

import io
import json
import logging
from types import SimpleNamespace

import httpx
import pytest

from app import logs
from tests.support.images import GREY, JPEG, RED
from tests.support.load import WAIT_S
from tests.support.service_process import running

NULL = ("--models", "resnet18", "--weights", "random", "--device", "null", "--engine", "auto", "--precision", "auto")
PREDICT = "/v1/models/resnet18:predict"


@pytest.fixture
def written(monkeypatch):
    """Capture what goes to stderr; restore the logging afterwards."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=stream))
    yield stream
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_a_line_for_machines_is_one_json_object(written):
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
    assert len(written.getvalue().splitlines()) == 2
    first, second = lines(written.getvalue())
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


@pytest.mark.parametrize(("terminal", "json_lines"), [(True, 0), (False, 1)])
def test_auto_is_text_on_a_terminal_and_json_elsewhere(written, monkeypatch, terminal, json_lines):
    monkeypatch.setattr(written, "isatty", lambda: terminal)
    logs.configure("info", "auto")
    logging.getLogger("anychip.test").info("hello")
    assert len(lines(written.getvalue())) == json_lines


def test_requests_are_in_the_log_where_asked_for_failures_always_and_secrets_never(tmp_path):
    """An image that makes its batch fail: the server's and the worker's lines name the request."""
    secret = "hunter2"
    headers = {**JPEG, "Authorization": f"Bearer {secret}", "X-Api-Key": secret, "Cookie": secret}
    options = (*NULL, "--null", "fail=#ff0000", "--log-level", "debug", "--log-requests", "true")
    with running(tmp_path, *options) as service:
        for name, body in (("good", GREY), ("bad", RED)):
            asked = {**headers, "X-Request-Id": name}
            httpx.post(f"{service.url}{PREDICT}", content=body, headers=asked, timeout=WAIT_S)
        httpx.get(f"{service.url}/nothing?token={secret}", timeout=WAIT_S)
        # A name that no parameter has is refused; neither it nor its value is in a line.
        refused = httpx.post(f"{service.url}{PREDICT}?token={secret}", content=GREY, headers=headers, timeout=WAIT_S)
        assert refused.status_code == 400
    text = service.log.read_text()
    assert secret not in text
    found = lines(text)
    assert len(found) == len(text.splitlines()), "a line is not JSON"
    about = [line for line in found if "request_id" in line]
    failed = [line for line in about if line["level"] == "error"]
    assert {line["request_id"] for line in failed} == {"bad"}
    assert any("failed twice" in line["message"] for line in failed)
    assert any(line.get("worker", "").startswith("null:0#") for line in found if line["logger"] == "anychip.worker")
    requests = [(line["request_id"], line["status"], line["code"]) for line in about if line["message"] == "request"]
    assert requests[:2] == [("good", 200, "OK"), ("bad", 500, "INFERENCE_FAILED")]
    assert requests[2][1:] == (404, "NOT_FOUND")
    assert all("?" not in line.get("path", "") for line in about)
