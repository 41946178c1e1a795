"""The processes that decode images: what waits for them, what keeps them, and what runs in them.

Must not know requests, queues in front of devices, or a transport. Bytes of clients are parsed there and nowhere else.
"""
