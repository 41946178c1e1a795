"""Device that computes nothing, and fails on demand.

Must not import torch's devices.
"""
