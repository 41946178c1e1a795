"""The service inside another program: an ASGI application, and replicas of Ray Serve.

Must not be imported by anychip, nor listen: that is the host's.
"""
