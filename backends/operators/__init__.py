"""Operators that a device lacks: which these are, how each ran, and what takes their place.

Must not know networks or vendors by name.
"""
