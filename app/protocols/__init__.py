"""Protocols of both transports: tensors, Triton's extensions, the terms of a request. Must not know HTTP or gRPC."""
