"""Scheduling: queues, batch formation, latency estimates, dispatch, and residency of models on devices.

Must not know encoded images, predictions or a transport.
"""
