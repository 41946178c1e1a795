"""Routes of HTTP alone: reading of requests, and the form of their answers on the wire."""
