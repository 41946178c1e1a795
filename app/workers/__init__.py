"""The processes that own devices, from both sides: what keeps them, and what runs in them.

Must not know queues, deadlines or a transport.
"""
