"""Load on a running service, in closed and in open loop: anychip's own route, and the Open Inference Protocol of any
server. Must not know how it is shown.
"""

from __future__ import annotations

import json
import math
import ssl
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import numpy as np

from anychip_tools.benchmark.load import (
    Address,
    ClosedLoad,
    allow_many_connections,
    drive,
    drive_open,
    percentile,
    poisson_arrivals,
    request_bytes,
)
from app.arguments import CommandError
from app.protocols import wire

Protocol = Literal["predict", "v2"]
_TIMEOUT_S = 30.0
_WARM_UP_S = 1.0
_SEED = 0


class LoadedService:
    """Model of a service with its request made ready. Raises CommandError if it does not answer."""

    def __init__(self, url: str, model: str, protocol: Protocol, image: bytes, *, batch: int, key: str) -> None:
        """Ask for the model's inputs. `batch`: items in a request of tensors. `key`: API key, or nothing."""
        self._address = address_of(url)
        self._url, self._protocol = url, protocol
        self.images = 1 if protocol == "predict" else batch
        host = f"{self._address.host}:{self._address.port}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if protocol == "v2":
            tensors = _tensors_of(_described(url, model, headers), batch, image)
            self._request = _infer_request(model, tensors, host, headers)
        else:
            self._request = request_bytes(f"/v1/models/{model}:predict", image, "image/jpeg", headers, host)
        allow_many_connections()

    def closed(self, connections: int, seconds: float) -> dict[str, Any]:
        """Load over so many connections; each sends its next request after the last answer."""
        load = self._closed(connections, seconds)
        if not load.latencies_s:
            raise CommandError(f"{self._url} gave no good answer: {dict(load.errors) or 'none came'}")
        return {
            "protocol": self._protocol,
            "mode": "closed",
            "connections": connections,
            "batch": self.images,
            "images_per_s": load.answers_per_s * self.images,
            "answers_per_s": load.answers_per_s,
            **{f"p{percent}_ms": load.percentile_ms(percent) for percent in (50, 90, 99)},
            "errors": sum(load.errors.values()),
            "errors_by_status": dict(load.errors),
        }

    def open(self, rate: float, seconds: float, timeout_s: float) -> dict[str, Any]:
        """Load at random times, at this mean rate, even if earlier requests are unanswered."""
        due_s = poisson_arrivals(rate, seconds, _SEED)
        load = drive_open(self._address, self._request, due_s, seconds=seconds, timeout_s=timeout_s)
        latencies_s = [each.latency_s for each in load.accepted]
        return {
            "protocol": self._protocol,
            "mode": "open",
            "rate": rate,
            "batch": self.images,
            "goodput_per_s": load.goodput_per_s * self.images,
            "images_per_s": sum(each.arrived_s <= load.seconds for each in load.accepted) / seconds * self.images,
            **{f"p{percent}_ms": percentile(latencies_s, percent) * 1e3 for percent in (50, 90, 99)},
            "errors": sum(load.refused.values()) + load.connection_errors + load.unanswered,
            "errors_by_status": {**load.refused, "unanswered": load.unanswered, "connection": load.connection_errors},
            "lateness_p99_ms": percentile(load.lateness_s, 99) * 1e3,
        }

    def warm_up(self) -> None:
        """Load for a second, so that first connections, pages and batches are not measured."""
        self._closed(4, _WARM_UP_S)

    def _closed(self, connections: int, seconds: float) -> ClosedLoad:
        try:
            return drive(self._address, self._request, connections, seconds)
        except OSError as error:
            raise CommandError(f"nothing answers at {self._url}: {error}") from None


def address_of(url: str) -> Address:
    """Parse a URL to an address. Raises CommandError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandError(f"{url!r} is no address like http://127.0.0.1:8000")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Address(parts.hostname, parts.port or (443 if tls else 80), tls)


def _infer_request(model: str, tensors: list[wire.InputTensor], host: str, headers: Mapping[str, str]) -> bytes:
    inputs = [
        {
            "name": each.name,
            "datatype": each.datatype,
            "shape": list(each.shape),
            "parameters": {"binary_data_size": len(each.content)},
        }
        for each in tensors
    ]
    head = json.dumps({"inputs": inputs}).encode()
    path = f"/v2/models/{model}/infer"
    headers = {"Inference-Header-Content-Length": str(len(head)), **headers}
    body = head + b"".join(each.content for each in tensors)
    return request_bytes(path, body, "application/octet-stream", headers, host)


def _described(url: str, model: str, headers: Mapping[str, str]) -> list[Mapping[str, Any]]:
    try:
        answer = httpx.get(f"{url}/v2/models/{model}", headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        inputs: list[Mapping[str, Any]] = answer.json()["inputs"]
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise CommandError(f"{url} does not say what {model} takes (/v2/models/{model}): {error}") from None
    return inputs


def _tensors_of(inputs: list[Mapping[str, Any]], batch: int, image: bytes) -> list[wire.InputTensor]:
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
            made.append(wire.InputTensor(each["name"], "BYTES", shape, wire.to_bytes([image] * math.prod(shape))))
            continue
        if each["datatype"] not in wire.DATATYPES:
            raise CommandError(f"{each['name']} is of type {each['datatype']}, which is not sent here")
        dtype = wire.DATATYPES[each["datatype"]]
        if dtype.kind == "f":
            numbers = source.standard_normal(shape).astype(dtype)
        else:
            numbers = source.integers(0, 256 if dtype.itemsize == 1 and dtype.kind == "u" else 2, shape).astype(dtype)
        made.append(wire.InputTensor(each["name"], each["datatype"], shape, numbers.tobytes()))
    return made
