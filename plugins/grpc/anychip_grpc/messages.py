"""The protocol's messages, made from the compiled open_inference.proto (deploy/generate_rpc.py).

Owns: their descriptor pool, which is separate, so that the same process may import a client's generated code for the
same protocol. Must not know what they mean.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

POOL: Any = descriptor_pool.DescriptorPool()
_compiled = descriptor_pb2.FileDescriptorSet.FromString(
    files("anychip_grpc").joinpath("open_inference.binpb").read_bytes()
)
for _file in _compiled.file:
    POOL.Add(_file)

METHODS: dict[str, Any] = {method.name: method for method in POOL.FindServiceByName(SERVICE).methods}
"""Descriptors of the service's methods."""


def message(name: str) -> Any:
    """Return the class of a message of the protocol. Raises KeyError."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def message_of(descriptor: Any) -> Any:
    """Return the class of a descriptor's messages."""
    return message_factory.GetMessageClass(descriptor)
