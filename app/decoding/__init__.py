"""Decoders as the server sees them: the queue before them, their processes. Must not parse bytes of clients."""
