"""The service inside another program: an ASGI application, Ray Serve's replicas. Must not be imported by anychip."""
