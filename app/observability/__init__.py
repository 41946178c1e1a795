"""What the service tells about itself: Prometheus metrics, Triton's counters, traces.

Must not decide anything.
"""
