"""`anychip verify`: what a device and its software do, checked and measured in one run, without a network.

    doctor ─► contract ─► engines ─► service ─► anychip-report.json, anychip-report.md

Owns: the parts, the order of them, and the report. Every part runs in a process of its own, so that a driver that
hangs or crashes costs only that part. Must not write a host's name, serial numbers or paths: reports are made to be
published.
"""
