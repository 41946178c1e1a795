"""Precision gate and its images: an executable may serve only after its answers agree with float32.

Must not know requests or processes.
"""
