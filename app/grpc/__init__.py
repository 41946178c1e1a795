"""The Open Inference Protocol over gRPC, beside HTTP in the same event loop. Needs `anychip[grpc]`.

Owns: what is gRPC's alone. Must not know HTTP, nor what requests mean and can fail with: that is app.protocols'
business, so that both transports say the same.
"""
