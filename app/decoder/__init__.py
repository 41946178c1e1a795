"""Decoder process, from inside: its loop, its jobs, its inbox.

Must not know requests, queues or a transport. Bytes of clients are parsed here and nowhere else.
"""
