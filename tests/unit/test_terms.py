"""What a request says: its deadline and priority, its body and parameters in other servers' dialects, its origin."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import Settings
from app.errors import ServiceError
from app.http import call
from app.http.call import AsgiRequest, read_query
from app.http.edge import Cors
from app.http.routes import predict
from app.observability.metrics import Recorder
from app.protocols import parameters
from app.protocols.documents import packed_with_image, read_instances, read_tensors, unpack
from app.protocols.options import INFER, QUERY, VERSION, Parameter, check_names

BEGAN_S = 1000.0
GIVEN: dict[str, Any] = {"models": "m", "timeout_ms": 30_000}
SETTINGS = Settings(**GIVEN)


def asgi_request(query, **headers):
    context = SimpleNamespace(started_s=BEGAN_S, recorder=Recorder())
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return AsgiRequest({"anychip": context, "query_string": query.encode(), "headers": named}, asyncio.Event().wait)


def terms_of(query="", **headers):
    return predict.PredictCall(asgi_request(query, **headers), "m").terms(SETTINGS)


@pytest.mark.parametrize(
    ("query", "header", "seconds"),
    [
        ("", None, 30),
        ("", "250", 0.25),
        ("timeout_ms=400", None, 0.4),
        ("timeout_ms=400", "250", 0.4),
        ("timeout_ms=250", "400", 0.25),
        ("top_k=1", "250", 0.25),
        ("timeout_ms=0.001", None, 1e-6),
    ],
)
def test_a_deadline_is_of_the_query_else_of_the_header_else_the_services(query, header, seconds):
    headers = {} if header is None else {"x_timeout_ms": header}
    assert terms_of(query, **headers).deadline_s == pytest.approx(BEGAN_S + seconds)


@pytest.mark.parametrize("timeout_ms", ["600000", "600001", "1e6", "1e9"])
def test_a_deadline_is_at_most_ten_minutes_away(timeout_ms):
    assert terms_of(x_timeout_ms=timeout_ms).deadline_s == BEGAN_S + 600
    assert terms_of(f"timeout_ms={timeout_ms}").deadline_s == BEGAN_S + 600
    settings = SETTINGS.model_copy(update={"timeout_ms": float(timeout_ms)})
    assert predict.PredictCall(asgi_request(""), "m").terms(settings).deadline_s == BEGAN_S + 600


@pytest.mark.parametrize("timeout_ms", ["0", "-1", "0.0001", "1.1e9", "1e300", "inf", "nan", "", "soon"])
def test_a_deadline_that_is_none_is_refused_wherever_it_stands(timeout_ms):
    for query, headers in ((f"timeout_ms={timeout_ms}", {}), ("", {"x_timeout_ms": timeout_ms})):
        with pytest.raises(ServiceError) as refused:
            terms_of(query, **headers)
        assert refused.value.code == "INVALID_REQUEST"
        assert "must be a number from 0.001 to 1e+09" in refused.value.message


@pytest.mark.parametrize("priority", ["-101", "101", "1e9", "nan", "high", "", "0.5"])
def test_a_priority_beyond_a_hundred_is_refused(priority):
    assert [terms_of(x_priority=each).priority for each in ("-100", "0", "100")] == [-100, 0, 100]
    with pytest.raises(ServiceError) as refused:
        terms_of(x_priority=priority)
    assert refused.value.code == "INVALID_REQUEST"
    assert "X-Priority must be" in refused.value.message


IMAGE = bytes(range(256)) + b"?>" * 20
TEXT = base64.b64encode(IMAGE).decode()
ACCEPTED = {
    "as it is": TEXT,
    "line breaks": base64.encodebytes(IMAGE).decode(),
    "CRLF": base64.encodebytes(IMAGE).decode().replace("\n", "\r\n"),
    "data URL": f"data:image/png;base64,{TEXT}",
    "data URL with line breaks": "data:image/png;base64," + base64.encodebytes(IMAGE).decode(),
}
REFUSED = {
    "URL-safe": (base64.urlsafe_b64encode(IMAGE).decode(), "is URL-safe base64"),
    "without padding": (TEXT.rstrip("="), "no multiple of 4"),
    "cut": (TEXT[:-7], "no multiple of 4"),
    "words": ("hello world!", "is not base64"),
    "a data URL of text": ("data:text/plain,hello", "a data URL that is not of base64"),
}


FORMS: dict[str, tuple[Callable[[str], Any], Callable[[bytes], bytes]]] = {
    "instances": (lambda text: {"instances": [{"b64": text}]}, lambda body: read_instances(body, 1)[0]),
    "tensors": (
        lambda text: {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}]},
        lambda body: bytes(read_tensors(body, None)[1][0])[4:],
    ),
    "image": (lambda text: {"image": text}, lambda body: bytes(unpack(packed_with_image(body, 0))[1][0])),
}
"""How an image is written in each of the forms of JSON, and read again."""


@pytest.mark.parametrize("dialect", [*ACCEPTED, *REFUSED])
@pytest.mark.parametrize("form", FORMS)
def test_a_dialect_of_base64_is_read_or_named(dialect: str, form: str) -> None:
    written, read_image = FORMS[form]
    if dialect in ACCEPTED:
        assert read_image(json.dumps(written(ACCEPTED[dialect])).encode()) == IMAGE
        return
    text, said = REFUSED[dialect]
    with pytest.raises(ServiceError, match=said) as error:
        read_image(json.dumps(written(text)).encode())
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"instances": [{"image_bytes": {"b64": TEXT}}]}, "within 'image_bytes': send that object itself"),
        ({"instances": [{"data": TEXT}]}, "it has 'data': name that b64"),
        ({"inputs": [{"b64": TEXT}]}, "and it has 'inputs'"),
        ([TEXT], 'must be {"instances"'),
        ({"url": "http://example.com/cat.jpg"}, "does not fetch URLs"),
        ({"instances": []}, "at least one instance"),
        ({"instances": [{"b64": 7}]}, "instance 0 must be"),
        ({"instances": [{"b64": TEXT}], "parameters": {"top_k": 1}}, "'parameters' of the body is not read here"),
        ({"instances": [{"b64": TEXT}], "tile": 640}, "'tile' is not read here; tile belongs in the query of :predict"),
        (
            {"instances": [{"b64": TEXT, "config": {"conf": 0.9}}]},
            "'conf' is not read here; score_threshold belongs in the query",
        ),
        ({"instances": [{"b64": TEXT, "parameters": {"top_k": 1}}]}, "'parameters' of the body is not read here"),
        ({"instances": [{"b64": TEXT, **dict.fromkeys(map(str, range(64)), 1)}]}, "66 parameters are more than the 64"),
        (b"not json", "the body is not JSON"),
        (b"\xff\xd8\xff\xe0", "the body is an image and not JSON; send it with its own Content-Type"),
        (b'{"instances": [{"b64": NaN}]}', "the body is not JSON"),
    ],
)
def test_the_form_of_another_server_is_named(body: Any, said: str) -> None:
    with pytest.raises(ServiceError, match=said) as refused:
        read_instances(body if isinstance(body, bytes) else json.dumps(body).encode(), 1)
    assert refused.value.code == "INVALID_REQUEST"


@pytest.mark.parametrize("name", ["score_treshold", "max_detection", "conf", "Conf", "conf_thres", "iouThreshold"])
def test_a_misspelt_option_of_the_protocol_is_refused_and_an_unknown_one_is_not(name: str) -> None:
    ours = ["binary_data_output", "classification", "content_type", "priority", "sequence_id", "timeout"]
    check_names((*ours, "title", "overlay", "stop", "x" * 99), INFER)
    with pytest.raises(ServiceError, match=f"there is no parameter '{name}' here; did you mean"):
        check_names([name], INFER)
    with pytest.raises(ServiceError, match=f"'{name}' is not read here; .* belongs in the request's parameters"):
        read_tensors(json.dumps({"inputs": [], name: 1}).encode(), None)


async def read(body: bytes, content_type: str, *, any_type: bool = False) -> Any:
    nothing: Any = None
    headers = {b"content-type": content_type.encode()}
    return await call.read_images(headers, body, 4, nothing, nothing, any_type=any_type)


def images(body: bytes, content_type: str, *, any_type: bool = False) -> Any:
    return asyncio.run(read(body, content_type, any_type=any_type))


def multipart(head: str, content: bytes) -> bytes:
    return b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n--x--\r\n"


def test_a_field_of_a_form_is_refused_by_name_except_where_other_servers_left_it_alone() -> None:
    """It would change nothing, and its sender would not know."""
    file = multipart('Content-Disposition: form-data; name="file"; filename="a.jpg"', b"\xff\xd8 image")
    form = multipart('Content-Disposition: form-data; name="top_k"', b"3").removesuffix(b"--x--\r\n") + file
    with pytest.raises(ServiceError, match="field 'top_k' is not read here; parameters belong in the query"):
        images(form, "multipart/form-data; boundary=x")
    assert images(form, "multipart/form-data; boundary=x", any_type=True) == [b"\xff\xd8 image"]


FILE = b'--b\r\ncontent-disposition: form-data; name="f"; filename="f"\r\n\r\n'
BOUNDARY = "multipart/form-data; boundary=b"


def form_of(parts: list[bytes]) -> bytes:
    return b"\r\n".join(FILE + part for part in parts) + b"\r\n--b--\r\n"


@pytest.mark.parametrize(
    "parts",
    [[b"\r" * (8 << 20)], [b"\r\n--" * (2 << 20)], [b"x", b"\r" * (8 << 20)]],
    ids=["one part", "almost ends", "two"],
)
async def test_the_loop_goes_on_while_a_large_form_is_read(parts: list[bytes]) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    found = await read(form_of(parts), BOUNDARY)
    counting.cancel()
    assert [bytes(each) for each in found] == parts
    assert turns >= 7  # Once for each megabyte but the first.


# The first piece that is parsed begins with the body, the first that is searched at the end of the part's head.
@pytest.mark.parametrize("begin", [0, len(FILE) - 4], ids=["parsed", "searched"])
@pytest.mark.parametrize("at", range(-2, 12))
def test_a_boundary_across_two_pieces_is_found(begin: int, at: int) -> None:
    parts = [b"x" * (begin + call._PIECE_BYTES - len(FILE) - at), b"z"]
    assert [bytes(each) for each in images(form_of(parts), BOUNDARY)] == parts


def test_a_parameter_that_there_is_not_or_that_comes_twice_is_refused_by_name() -> None:
    with pytest.raises(ServiceError, match="top_k is given more than once"):
        read_query(b"top_k=3&masks=none&top_k=3")
    with pytest.raises(ServiceError, match="there is top_k, score_threshold"):
        read_query(b"utm_source=mail")
    with pytest.raises(ServiceError, match="overlap has no effect without tile"):
        read_query(b"overlap=0.1")
    defaults = "&".join(f"{row.name}={row.default}" for row in QUERY if row.default is not None)
    assert read_query(defaults.encode()) == read_query(b""), "generated clients send every default"
    with pytest.raises(ServiceError, match="257 parameters are more than the 256"):
        read_query(b"&" * 256, any_name=True)
    assert read_query(b"utm_source=mail&top_k=3&top_k=4", any_name=True)[0].top_k == 4


@pytest.mark.parametrize("row", [row for row in QUERY if row != VERSION], ids=lambda row: row.name)
def test_a_value_that_a_parameter_cannot_have_is_refused_by_name(row: Parameter) -> None:
    with pytest.raises(ServiceError, match=f"^{row.name} must be "):
        parameters.read(row, {row.name: True})
    for value in ("many", "nan", "", *(() if row.choices else (row.low - 1, row.high + 1))):
        with pytest.raises(ServiceError, match=f"^{row.name} must be ") as refused:
            read_query(f"{row.name}={value}".encode())
        assert refused.value.code == "INVALID_REQUEST"


PAGE = (b"origin", b"https://app.example.com")
ASKED = [PAGE, (b"access-control-request-method", b"POST")]


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
