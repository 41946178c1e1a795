"""Reproducible comparisons: every figure is a ratio within one run. Speed is measured here, never in a timed test."""
