"""Requests of tests to a running service over HTTP, and readers of its answers."""

from __future__ import annotations

import json
import struct

import numpy as np


def assert_error(response, status, code):
    """Assert the shape that docs/api.md promises, on every failure of every route."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error", "code", "request_id"}
    assert body["code"] == code
    assert body["error"]
    assert "\n" not in body["error"]
    assert body["request_id"] == response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    return body["error"]


def element(content):
    return struct.pack("<I", len(content)) + content


def elements(content):
    found = []
    while content:
        (length,) = struct.unpack_from("<I", content)
        found.append(content[4 : 4 + length])
        content = content[4 + length :]
    return found


def images(*encoded, **parameters):
    content = b"".join(map(element, encoded))
    return {"name": "image", "shape": [len(encoded)], "datatype": "BYTES", "parameters": parameters}, content


def binary(path, document, content, *, post, header=None, **options):
    head = json.dumps(document).encode()
    length = str(len(head)) if header is None else header
    headers = {"Inference-Header-Content-Length": length, "Content-Type": "application/octet-stream"}
    return post(f"{path}/infer", content=head + content, headers=headers, **options)


def infer_images(client, path, *encoded, outputs=None, **request):
    tensor, content = images(*encoded)
    tensor["parameters"] = {"binary_data_size": len(content)}
    document = {"inputs": [tensor], **({} if outputs is None else {"outputs": outputs}), **request}
    return binary(path, document, content, post=client.post)


def outputs_of(answer):
    """Return every output as an array, or a list of bytes, from JSON or from the bytes after it."""
    assert answer.status_code == 200, answer.text
    length = answer.headers.get("inference-header-content-length")
    document = json.loads(answer.content[: int(length)] if length else answer.content)
    rest = answer.content[int(length) :] if length else b""
    types = {"FP32": "<f4", "INT32": "<i4", "UINT8": "u1"}
    found = {}
    for output in document["outputs"]:
        assert set(output) - {"parameters", "data"} == {"name", "shape", "datatype"}
        size = output.get("parameters", {}).get("binary_data_size")
        if output["datatype"] == "BYTES":
            if size is None:
                found[output["name"]] = [text.encode() for text in output["data"]]
            else:
                found[output["name"]] = elements(rest[:size])
            assert len(found[output["name"]]) == np.prod(output["shape"])
        else:
            flat = np.array(output["data"], types[output["datatype"]]) if size is None else None
            flat = np.frombuffer(rest[:size], types[output["datatype"]]) if flat is None else flat
            found[output["name"]] = flat.reshape(output["shape"])
        rest = rest[size or 0 :]
    assert not rest
    return document, found
