"""A device that computes nothing, and fails where it is told to.

Must not import torch's devices.
"""
