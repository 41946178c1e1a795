"""Device that computes nothing, and fails on demand."""
