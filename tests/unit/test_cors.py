"""Which web pages may read an answer: none but those whose origins were named."""

from __future__ import annotations

import pytest

from app.http.cors import Cors

PAGE = (b"origin", b"https://app.example.com")
ASKED = [PAGE, (b"access-control-request-method", b"POST")]


def test_no_origin_is_named_and_no_header_is_sent() -> None:
    cors = Cors(())
    assert not cors.on
    assert cors.headers([PAGE]) == [(b"vary", b"origin")]


@pytest.mark.parametrize("named", ["https://app.example.com", "https://APP.example.com/", "*"])
def test_a_page_that_was_named_may_read(named: str) -> None:
    cors = Cors((named,))
    said = dict(cors.headers([PAGE]))
    assert said[b"access-control-allow-origin"] == PAGE[1]
    assert b"access-control-allow-credentials" not in said, "nothing here is asked with cookies"
    allowed = cors.preflight("OPTIONS", ASKED)
    assert allowed is not None
    assert b"authorization" in dict(allowed)[b"access-control-allow-headers"]


@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"https://app.example.com.evil.example", b""])
def test_other_pages_may_not(origin: bytes) -> None:
    cors = Cors(("https://app.example.com",))
    assert cors.headers([(b"origin", origin)]) == [(b"vary", b"origin")]
    assert cors.preflight("OPTIONS", [(b"origin", origin), ASKED[1]]) == [(b"vary", b"origin")]


def test_only_a_browsers_question_is_answered_beforehand() -> None:
    cors = Cors(("*",))
    assert cors.preflight("OPTIONS", [PAGE]) is None
    assert cors.preflight("POST", ASKED) is None
