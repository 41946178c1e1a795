"""The Open Inference Protocol over gRPC, beside HTTP in the same event loop.

Owns: what is gRPC's alone. Must not be imported by anychip, nor know HTTP, nor what requests mean and can fail with:
that is app.protocols' business, so that both transports say the same.
"""
