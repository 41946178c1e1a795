"""Reproducible comparisons: every figure as a ratio within one run. Speed lives here, never in a timed test."""
