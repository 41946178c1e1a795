"""Prometheus metrics, Triton's counters, and traces of the service. Must not decide anything."""
