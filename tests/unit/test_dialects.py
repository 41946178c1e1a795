"""What clients of other servers send: it is read, or the sentence says what to send instead."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from app.errors import ServiceError
from app.http.call import read_images, read_query
from app.protocols.documents import read_instances, read_tensors, read_with_image
from app.protocols.options import QUERY, VERSION, Parameter

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


def sent(text: str) -> list[Any]:
    """Read an image in this text by each of the forms of JSON."""
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    _, [packed] = read_tensors(json.dumps({"inputs": [tensor]}).encode(), None)
    [instance] = read_instances(json.dumps({"instances": [{"b64": text}]}).encode(), 1)
    _, [image] = read_with_image(json.dumps({"image": text}).encode())
    return [instance, bytes(packed)[4:], bytes(image)]


@pytest.mark.parametrize("dialect", ACCEPTED)
def test_a_dialect_of_base64_is_read(dialect: str) -> None:
    assert sent(ACCEPTED[dialect]) == [IMAGE] * 3


@pytest.mark.parametrize("dialect", REFUSED)
@pytest.mark.parametrize("form", ["instances", "tensors", "image"])
def test_another_dialect_is_named(dialect: str, form: str) -> None:
    text, said = REFUSED[dialect]
    body = {
        "instances": {"instances": [{"b64": text}]},
        "tensors": {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}]},
        "image": {"image": text},
    }[form]
    read: dict[str, Any] = {"instances": read_instances, "tensors": read_tensors, "image": read_with_image}
    more = {"instances": (1,), "tensors": (None,), "image": ()}[form]
    with pytest.raises(ServiceError, match=said) as error:
        read[form](json.dumps(body).encode(), *more)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"instances": [{"image_bytes": {"b64": TEXT}}]}, "within 'image_bytes': send that object itself"),
        ({"instances": [{"data": TEXT}]}, "it has 'data': name that b64"),
        ({"instances": [TEXT]}, "is a string: name it"),
        ({"inputs": [{"b64": TEXT}]}, "and it has 'inputs'"),
        ({"image": TEXT}, "and it has 'image'"),
        ([TEXT], 'must be {"instances"'),
        ({"url": "http://example.com/cat.jpg"}, "does not fetch URLs"),
        ({"instances": [{"image_url": "http://example.com/cat.jpg"}]}, "does not fetch URLs"),
        ({}, 'must be {"instances"'),
        ({"instances": []}, "at least one instance"),
        ({"instances": [{"b64": 7}]}, "instance 0 must be"),
        (b"not json", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b'{"instances": [{"b64": NaN}]}', "the body is not JSON"),
    ],
)
def test_the_form_of_another_server_is_named(body: Any, said: str) -> None:
    with pytest.raises(ServiceError, match=said) as refused:
        read_instances(body if isinstance(body, bytes) else json.dumps(body).encode(), 1)
    assert refused.value.code == "INVALID_REQUEST"


# Bodies


def images(body: bytes, content_type: str, *, any_type: bool = False) -> Any:
    """Read the images of a body."""
    headers = {b"content-type": content_type.encode()}
    nothing: Any = None
    return asyncio.run(read_images(headers, body, 4, nothing, nothing, any_type=any_type))


def multipart(head: str, content: bytes) -> bytes:
    return b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n--x--\r\n"


@pytest.mark.parametrize("size", [200, 2 << 20])
def test_a_part_without_a_filename_is_named(size: int) -> None:
    body = multipart('Content-Disposition: form-data; name="picture"', b"\xff\xd8" + bytes(size))
    with pytest.raises(ServiceError, match="filename"):
        images(body, "multipart/form-data; boundary=x")
    named = multipart('Content-Disposition: form-data; name="picture"; filename="a.jpg"', b"\xff\xd8" + bytes(size))
    assert len(images(named, "multipart/form-data; boundary=x")[0]) == size + 2


JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF\0\1" + bytes(range(256)) * 4
FORM = "application/x-www-form-urlencoded"


def test_what_curl_leaves_out_is_said() -> None:
    assert images(JPEG, FORM) == [JPEG]
    lost = JPEG.translate(None, b"\0\r\n")
    with pytest.raises(ServiceError, match="--data-binary"):
        images(lost, FORM)
    assert images(lost, "image/jpeg") == [lost]  # It says what it is, and is found broken where it is decoded.


def test_a_field_of_a_form_is_refused_by_name_except_where_other_servers_left_it_alone() -> None:
    """It would change nothing, and its sender would not know."""
    file = multipart('Content-Disposition: form-data; name="file"; filename="a.jpg"', b"\xff\xd8 image")
    form = multipart('Content-Disposition: form-data; name="top_k"', b"3").removesuffix(b"--x--\r\n") + file
    with pytest.raises(ServiceError, match="field 'top_k' is not read here; parameters belong in the query"):
        images(form, "multipart/form-data; boundary=x")
    assert images(form, "multipart/form-data; boundary=x", any_type=True) == [b"\xff\xd8 image"]


def test_a_parameter_that_there_is_not_or_that_comes_twice_is_refused_by_name() -> None:
    with pytest.raises(ServiceError, match="top_k is given more than once"):
        read_query(b"top_k=3&masks=none&top_k=3")
    with pytest.raises(ServiceError, match="there is top_k, score_threshold"):
        read_query(b"utm_source=mail")
    assert read_query(b"utm_source=mail&top_k=3&top_k=4", any_name=True)[0].top_k == 4


@pytest.mark.parametrize("row", [row for row in QUERY if row != VERSION], ids=lambda row: row.name)
def test_a_value_that_a_parameter_cannot_have_is_refused_by_name(row: Parameter) -> None:
    for value in ("many", "nan", "", *(() if row.choices else (row.low - 1, row.high + 1))):
        with pytest.raises(ServiceError, match=f"^{row.name} must be ") as refused:
            read_query(f"{row.name}={value}".encode())
        assert refused.value.code == "INVALID_REQUEST"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("threshold", "score_threshold"),
        ("treshold", "score_threshold"),
        ("Conf", "score_threshold"),
        ("iou", "iou_threshold"),
        ("iou_treshold", "iou_threshold"),
        ("k", "top_k"),
    ],
)
def test_what_others_call_a_parameter_is_understood(name: str, meant: str) -> None:
    with pytest.raises(ServiceError, match=f"did you mean {meant}"):
        read_query(f"{name}=0.5".encode())
