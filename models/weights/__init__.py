"""Weight files, read without running anything in them.

Must not know architectures.
"""
