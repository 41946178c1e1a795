"""The Open Inference Protocol over gRPC, beside HTTP in the same event loop. Needs `anychip[grpc]`.

Owns: what is gRPC's alone. What requests mean, and all they can fail with, is the business of app.protocols, so that
both transports say the same.
"""
