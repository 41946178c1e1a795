"""Requests in JSON, turned into bytes: base64 and lists of numbers become the bytes of the binary forms.

Must not import anything large: for large bodies it runs in a process of its own (app.ingress.converter), as making
Python objects of megabytes of JSON holds the interpreter.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from app.errors import invalid_request
from app.images.header import begins_as_image
from app.protocols import wire
from app.protocols.options import check_names
from app.protocols.wire import BYTES, checked_count, checked_shape

Document = dict[str, Any]

_WHITE = str.maketrans("", "", " \t\r\n")
_PLAIN = str.maketrans("-_", "+/")
_ALPHABET = re.compile("[A-Za-z0-9+/]+")
_MOST_HEAD_BYTES = 64 * 1024
"""Most bytes of a request without its tensors: names, shapes, parameters."""


def loaded(body: wire.Buffer, instead: str = "with its own Content-Type, such as image/jpeg", hint: str = "") -> Any:
    """Read the values of a body of JSON. Raises INVALID_REQUEST, which says of an image how to send it `instead`."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if begins_as_image(body):
            raise invalid_request(f"the body is an image and not JSON; send it {instead}") from None
        raise invalid_request(f"the body is not JSON: {error}{hint}") from None


def read_instances(body: wire.Buffer, max_images: int) -> list[bytes]:
    """Read the images of `{"instances": [{"b64": "…"}]}`. Raises INVALID_REQUEST, also for parameters among them."""
    document = loaded(body)
    found = document if isinstance(document, dict) else {}
    instances = found.get("instances")
    parts = [each for each in (found, *(instances if isinstance(instances, list) else ())) if isinstance(each, dict)]
    parts += [value for each in parts for value in each.values() if isinstance(value, dict)]
    names = [name for each in parts for name, value in each.items() if value not in (None, {})]
    if "parameters" in names:
        raise invalid_request("'parameters' of the body is not read here; parameters belong in the query")
    check_names(names, place="query")
    if not isinstance(instances, list) or not instances:
        _refuse_url(found, "the body")
        other = next((name for name in ("inputs", "image", "images", "file", "b64", "data") if name in found), "")
        hint = f", and it has {other!r}" if other else ""
        raise invalid_request(f'the body must be {{"instances": [{{"b64": "…"}}]}} with at least one instance{hint}')
    if len(instances) > max_images:
        raise invalid_request(f"{len(instances)} images are more than the {max_images} a request may hold")
    return [_instance(number, instance) for number, instance in enumerate(instances)]


def packed_instances(body: wire.Buffer, max_images: int) -> memoryview:
    """Read and pack these images, for app.ingress.converter."""
    return pack({}, read_instances(body, max_images), limited=False)


def packed_with_image(body: wire.Buffer, _: int) -> memoryview:
    """Pack a JSON object without its image, and the image: `image` or `file`, in base64. Raises INVALID_REQUEST."""
    document = loaded(body, 'in base64 as the "image" of a JSON object')
    found = document if isinstance(document, dict) else {}
    encoded = next((found.pop(name) for name in ("image", "file") if isinstance(found.get(name), str)), None)
    if encoded is None:
        raise invalid_request('the body must be a JSON object with an "image" or a "file" in base64')
    return pack(found, [_from_base64(encoded, "the image")])


def _instance(number: int, instance: Any) -> bytes:
    _refuse_url(instance, f"instance {number}")
    encoded = instance.get("b64") if isinstance(instance, dict) else None
    if not isinstance(encoded, str):
        raise invalid_request(f'instance {number} must be {{"b64": "…"}}{_instead(instance)}')
    return _from_base64(encoded, f"instance {number}")


def _refuse_url(found: Any, which: str) -> None:
    if isinstance(found, dict) and any(name in found for name in ("url", "image_url")):
        raise invalid_request(f"{which}: this server does not fetch URLs; send the image itself")


def _instead(instance: Any) -> str:
    """Describe an instance that has no "b64" of its own: the forms of other servers."""
    if isinstance(instance, str):
        return ", and is a string: name it"
    if not isinstance(instance, dict) or not instance:
        return ""
    name, value = next(iter(instance.items()))
    if isinstance(value, dict) and isinstance(value.get("b64"), str):
        return f", as it is within {name[:64]!r}: send that object itself"
    return f", and it has {name[:64]!r}" + (": name that b64" if isinstance(value, str) else "")


def _from_base64(text: str, which: str) -> bytes:
    """Decode base64, also with line breaks and as a data URL. Raises INVALID_REQUEST, naming other dialects."""
    with contextlib.suppress(binascii.Error, ValueError):
        return base64.b64decode(text, validate=True)
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise invalid_request(f"{which} is a data URL that is not of base64")
    text = text.translate(_WHITE)
    with contextlib.suppress(binascii.Error, ValueError):
        return base64.b64decode(text, validate=True)
    plain = text.translate(_PLAIN)
    if plain != text:
        raise invalid_request(f"{which} is URL-safe base64; send the usual one, which has + and / for - and _")
    if _ALPHABET.fullmatch(text):
        raise invalid_request(
            f"{which} is base64 of {len(text)} characters, which is no multiple of 4: it is cut, or has lost its ="
        )
    strange = next((each for each in text if not _ALPHABET.fullmatch(each) and each != "="), "=")
    raise invalid_request(f"{which} is not base64, which has no {strange!r} here: it begins with {text[:16]!r}")


def read_tensors(body: wire.Buffer, header_bytes: int | None) -> tuple[Document, list[wire.Buffer]]:
    """Return an inference request without its tensors, and the content of each of its inputs.

    `header_bytes`: how much of the body is JSON, None: all of it; the rest are tensors. Raises INVALID_REQUEST.
    """
    view = memoryview(body)
    hint = "" if header_bytes else "; with binary tensors, Inference-Header-Content-Length says how much of it is"
    document = loaded(view[:header_bytes], "with the header Inference-Header-Content-Length: 0", hint)
    if not isinstance(document, dict):
        raise invalid_request('the request must be a JSON object with "inputs"')
    check_names(document)
    rest = view[len(body) if header_bytes is None else header_bytes :]
    return document, _contents(objects(document, "inputs"), rest)


def packed_tensors(body: wire.Buffer, header_bytes: int) -> memoryview:
    """Read and pack these, for app.ingress.converter. `header_bytes` 0: all of it is JSON."""
    return pack(*read_tensors(body, header_bytes or None))


def _contents(tensors: Sequence[Document], rest: memoryview) -> list[wire.Buffer]:
    """Return the content of each input; `rest`: the bytes after the JSON, all of which must belong to one of them."""
    contents: list[wire.Buffer] = []
    for number, tensor in enumerate(tensors):
        name = name_of(tensor, f"input {number}")
        datatype = tensor.get("datatype")
        if not isinstance(datatype, str):
            raise invalid_request(f"the datatype of {name} must be a string")
        shape = checked_shape(name, tensor.get("shape"))
        parameters = parameters_of(tensor, name)
        if "shared_memory_region" in parameters:
            raise invalid_request("shared memory is not offered here; send the tensor itself")
        size = parameters.get("binary_data_size")
        if size is None and "data" not in tensor and len(tensors) == 1 and rest:
            size = len(rest)
        if size is None:
            contents.append(_content(name, datatype, shape, tensor.pop("data", None)))
            continue
        if "data" in tensor:
            raise invalid_request(f"{name} has both data and binary_data_size")
        if type(size) is not int or not 0 <= size <= len(rest):
            left = f"{len(rest)} bytes are left of the body"
            raise invalid_request(f"the binary_data_size of {name} is {size!r}, but {left}")
        contents.append(rest[:size])
        rest = rest[size:]
    if rest:
        raise invalid_request(f"the body goes on for {len(rest)} bytes after its last tensor")
    return contents


def _content(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> bytes:
    if not isinstance(data, list):
        raise invalid_request(f"{name} has neither a list as its data nor a binary_data_size")
    if datatype == "FP16":
        raise invalid_request(f"{name} is FP16, which has no form in JSON; send it as binary data")
    if datatype == BYTES:
        flat = [each for part in data for each in (part if isinstance(part, list) else [part])]
        return wire.to_bytes([_decoded(name, number, element) for number, element in enumerate(flat)])
    return wire.to_bytes(wire.from_values(name, datatype, shape, data))


def _decoded(name: str, number: int, element: Any) -> bytes:
    """Decode an element in base64: JSON strings hold characters, not bytes."""
    if not isinstance(element, str):
        raise invalid_request(f"element {number} of {name} must be a string in base64")
    return _from_base64(element, f"element {number} of {name}")


def objects(document: Mapping[str, Any], key: str) -> list[Document]:
    """Return the list of objects of this name; `outputs` may be missing. Raises INVALID_REQUEST."""
    listed = document.get(key)
    if listed is None and key == "outputs":
        return []
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise invalid_request(f'"{key}" must be a list of objects')
    checked_count(key, len(listed))
    return listed


def name_of(tensor: Mapping[str, Any], which: str) -> str:
    """Return a tensor's name. Raises INVALID_REQUEST."""
    name = tensor.get("name")
    if not isinstance(name, str) or not name:
        raise invalid_request(f"{which} has no name")
    return name


def parameters_of(owner: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """Return the parameters of a request or tensor. Raises INVALID_REQUEST."""
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or any(isinstance(each, dict | list) for each in parameters.values()):
        raise invalid_request(f"the parameters of {which} must be an object of strings, numbers and booleans")
    checked_count(f"parameters of {which}", len(parameters))
    return parameters


def pack(document: Document, contents: Sequence[wire.Buffer], *, limited: bool = True) -> memoryview:
    """Pack a document and its contents. Raises INVALID_REQUEST if a request is large without its tensors."""
    head = orjson.dumps({"document": document, "sizes": [len(each) for each in contents]})
    if limited and len(head) > _MOST_HEAD_BYTES:
        raise invalid_request(f"without its tensors the request is larger than {_MOST_HEAD_BYTES} bytes")
    return wire.joined([len(head).to_bytes(8, "little"), head, *contents])


def unpack(packed: wire.Buffer) -> tuple[Document, list[wire.Buffer]]:
    """Unpack a document and its contents, which are views."""
    start = 8 + int.from_bytes(packed[:8], "little")
    view = memoryview(packed)
    head = orjson.loads(view[8:start])
    contents: list[wire.Buffer] = []
    for size in head["sizes"]:
        contents.append(view[start : start + size])
        start += size
    return head["document"], contents


def write_outputs(packed: wire.Buffer, _: int) -> bytes:
    """Write the JSON of an answer; an output that is null in it gets its data, which is packed as bytes, as a list."""
    document, contents = unpack(packed)
    empty = [output for output in document["outputs"] if output.get("data", ...) is None]
    for output, content in zip(empty, contents, strict=True):
        output["data"] = np.frombuffer(content, wire.DATATYPES[output["datatype"]])
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
