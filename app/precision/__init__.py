"""Precision gate and its images, for an executable before it serves. Must not know requests or processes."""
