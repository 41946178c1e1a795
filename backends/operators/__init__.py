"""Operators that a device lacks: their detection, their counts, and their replacements.

Must not know networks or vendors by name.
"""
