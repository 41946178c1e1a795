"""Server's side of the decoders: the queue in front of them, and their start, watch and replacement.

Must not parse bytes of clients, and must not know a transport.
"""
