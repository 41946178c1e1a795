"""The server's side of the decoders: what waits for them, and what starts, watches and replaces them.

Must not parse bytes of clients, and must not know a transport.
"""
