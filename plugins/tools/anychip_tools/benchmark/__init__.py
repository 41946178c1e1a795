"""Measurements of a network on a device, of decoding, and of a service over HTTP and gRPC.

Must not know how results are shown, nor import the service: it may be another one, on another machine.
"""
