"""Requests in forms that a server understands: anychip's own, and the Open Inference Protocol of any server.

Owns: asking the server for a model's inputs, and building a request, over HTTP or gRPC. Must not send load.
"""

from __future__ import annotations

import json
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import numpy as np

from anychip_tools.benchmark.load import Address
from app.arguments import CommandError
from app.protocols import wire

Protocol = Literal["predict", "v2", "grpc"]
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Tensor:
    """Input of a request. `content`: bytes as the protocol sends them."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: bytes


def address_of(url: str) -> Address:
    """Parse a URL to an address. Raises CommandError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise CommandError(f"{url!r} is no address like http://127.0.0.1:8000")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Address(parts.hostname, parts.port or (443 if tls else 80), tls)


def request_bytes(
    path: str, body: bytes, content_type: str, headers: Mapping[str, str] | None = None, host: str = "localhost"
) -> bytes:
    """Build a whole HTTP/1.1 POST request."""
    fields = {"Host": host, "Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})}
    lines = (f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()))
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def predict_request(model: str, image: bytes, host: str, key: str = "") -> bytes:
    """Build a request of anychip's own route, with an image as its body."""
    return request_bytes(f"/v1/models/{model}:predict", image, "image/jpeg", _headers(key), host)


def infer_request(model: str, tensors: list[Tensor], host: str, key: str = "", *, binary: bool = True) -> bytes:
    """Build a request of the Open Inference Protocol: tensors as bytes behind the JSON, or numbers in it."""
    inputs: list[dict[str, Any]] = []
    for each in tensors:
        form: dict[str, Any] = {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)}
        if binary:
            form["parameters"] = {"binary_data_size": len(each.content)}
        else:
            form["data"] = np.frombuffer(each.content, wire.DATATYPES[each.datatype]).tolist()
        inputs.append(form)
    head = json.dumps({"inputs": inputs}).encode()
    path = f"/v2/models/{model}/infer"
    if not binary:
        return request_bytes(path, head, "application/json", _headers(key), host)
    headers = {"Inference-Header-Content-Length": str(len(head)), **_headers(key)}
    body = head + b"".join(each.content for each in tensors)
    return request_bytes(path, body, "application/octet-stream", headers, host)


def described(url: str, model: str, key: str = "") -> list[Mapping[str, Any]]:
    """Ask the server over HTTP for a model's inputs. Raises CommandError."""
    try:
        answer = httpx.get(f"{url}/v2/models/{model}", headers=_headers(key), timeout=_TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        inputs: list[Mapping[str, Any]] = answer.json()["inputs"]
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise CommandError(f"{url} does not say what {model} takes (/v2/models/{model}): {error}") from None
    return inputs


def tensors_of(inputs: list[Mapping[str, Any]], batch: int, image: bytes) -> list[Tensor]:
    """Make a tensor of every input's type and shape: the image for bytes, else random numbers.

    The first axis of unknown length is the batch, others are 1. A model of either an image or pixels gets the image.
    Raises CommandError.
    """
    source = np.random.default_rng(0)
    bytes_only = [each for each in inputs if each["datatype"] == "BYTES"]
    made = []
    for each in bytes_only[:1] or inputs:
        lengths = [int(length) for length in each["shape"]]
        shape = tuple(
            (batch if place == 0 else 1) if length < 0 else length for place, length in enumerate(lengths)
        ) or (batch,)
        if each["datatype"] == "BYTES":
            made.append(Tensor(each["name"], "BYTES", shape, wire.to_bytes([image] * math.prod(shape))))
            continue
        if each["datatype"] not in wire.DATATYPES:
            raise CommandError(f"{each['name']} is of type {each['datatype']}, which is not sent here")
        dtype = wire.DATATYPES[each["datatype"]]
        if dtype.kind == "f":
            numbers = source.standard_normal(shape).astype(dtype)
        else:
            numbers = source.integers(0, 256 if dtype.itemsize == 1 and dtype.kind == "u" else 2, shape).astype(dtype)
        made.append(Tensor(each["name"], each["datatype"], shape, numbers.tobytes()))
    return made


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
