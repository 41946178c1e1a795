"""The process that owns a device, from inside: load, run, measure, give memory back.

Must not know queues, deadlines or a transport.
"""
