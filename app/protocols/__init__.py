"""The protocols of both transports: the Open Inference Protocol, Triton's extensions, the terms of a request.

Must not know HTTP or gRPC.
"""
