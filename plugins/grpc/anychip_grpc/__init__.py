"""The Open Inference Protocol over gRPC, beside HTTP in the same event loop.

Owns: the parts specific to gRPC. Must not be imported by anychip, nor know HTTP, nor the meaning and the errors of
requests: app.protocols owns these, so that both transports answer alike.
"""
