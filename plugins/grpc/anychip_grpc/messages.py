"""The protocol's messages, made from the compiled open_inference.proto (deploy/generate_rpc.py), and their bytes.

Their descriptor pool is separate: the same process may import a client's generated code. A ModelInferRequest is checked
before it is parsed, so that no parser makes objects of a part that a client repeats a million times. Must not import
anything large: app.ingress.converter's process imports it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from anychip_base.protobuf import head_of, varint
from app.errors import invalid_request
from app.protocols import wire
from app.protocols.wire import BYTES, MAX_TENSORS, checked_count, checked_shape

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

Message = Any
POOL: Any = descriptor_pool.DescriptorPool()
_compiled = descriptor_pb2.FileDescriptorSet.FromString(
    files("anychip_grpc").joinpath("open_inference.binpb").read_bytes()
)
for _file in _compiled.file:
    POOL.Add(_file)

METHODS: dict[str, Any] = {method.name: method for method in POOL.FindServiceByName(SERVICE).methods}
"""Descriptors of the service's methods."""

_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
_RAW_INPUT_CONTENTS = 7  # The field's number in open_inference.proto.
_MOST_FIELDS = 4 * MAX_TENSORS
_LENGTH_DELIMITED = 2


def message(name: str) -> Any:
    """Return the class of a message of the protocol. Raises KeyError."""
    return GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


class RawRequest(NamedTuple):
    """A ModelInferRequest without its tensors, and the content of each of its inputs."""

    message: Message
    contents: Sequence[wire.Buffer]


def split(data: wire.Buffer) -> tuple[bytes, list[memoryview]]:
    """Split a serialised ModelInferRequest into the rest and raw_input_contents, as views.

    Reads only tags and lengths of the outermost fields, and a bounded number of them. Raises INVALID_REQUEST.
    """
    view, at = memoryview(data), 0
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    for _ in range(_MOST_FIELDS):
        if at == len(view):
            return b"".join(rest), raw
        begin = at
        tag, at = _varint(view, at)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            size, at = _varint(view, at)
            if at + size > len(view):
                raise _unreadable()
            if tag >> 3 == _RAW_INPUT_CONTENTS:
                raw.append(view[at : at + size])
                begin = at + size
            at += size
        elif kind == 0:
            _, at = _varint(view, at)
        else:
            at += {1: 8, 5: 4}.get(kind, len(view) + 1)
        if at > len(view):
            raise _unreadable()
        rest.append(view[begin:at])
    raise invalid_request(f"the request has more than {_MOST_FIELDS} inputs, outputs and parameters")


def parsed(rest: bytes, raw: Sequence[wire.Buffer]) -> RawRequest:
    """Parse the parts of a split request, within the limits on their number. Raises INVALID_REQUEST."""
    try:
        request = message("ModelInferRequest").FromString(rest)
    except DecodeError:
        raise _unreadable() from None
    checked_count("inputs", len(request.inputs))
    checked_count("outputs", len(request.outputs))
    for number, tensor in enumerate(request.inputs):
        if not tensor.name:
            raise invalid_request(f"input {number} has no name")
    for owner in (request, *request.inputs, *request.outputs):
        checked_count("parameters", len(owner.parameters))
    if raw:
        if len(raw) != len(request.inputs):
            raise invalid_request(f"there are {len(request.inputs)} inputs and {len(raw)} raw_input_contents")
        for tensor in request.inputs:
            if tensor.HasField("contents"):
                raise invalid_request(f"{tensor.name} has contents beside raw_input_contents")
        return RawRequest(request, raw)
    contents = []
    for tensor in request.inputs:
        if "shared_memory_region" in tensor.parameters:
            raise invalid_request("shared memory is not offered here; send the tensor itself")
        contents.append(_content(tensor))
        tensor.ClearField("contents")
    return RawRequest(request, contents)


def raw_form(data: wire.Buffer, _: int) -> bytes:
    """Serialise a request again, with its tensors in raw_input_contents. Raises INVALID_REQUEST."""
    request = parsed(*split(data))
    request.message.raw_input_contents.extend(bytes(content) for content in request.contents)
    return request.message.SerializeToString()  # type: ignore[no-any-return]


def _content(tensor: Message) -> bytes:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        hint = "which contents cannot hold; send it as raw_input_contents"
        raise invalid_request(f"{tensor.name} is {tensor.datatype!r}, {hint}")
    values = list(getattr(tensor.contents, field))
    if tensor.datatype == BYTES:
        return wire.to_bytes(values)
    shape = checked_shape(tensor.name, list(tensor.shape))
    return wire.to_bytes(wire.from_values(tensor.name, tensor.datatype, shape, values))


def field_head(message: Any, name: str, size: int) -> bytes:
    """Encode the head of a message's field of this size: its tag, and its length."""
    return head_of(message.DESCRIPTOR.fields_by_name[name].number, size)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    try:
        return varint(view, at)
    except (ValueError, IndexError):
        raise _unreadable() from None


def _unreadable() -> Exception:
    return invalid_request("the message is no ModelInferRequest")
