"""Scheduling: queues, batches, latency estimates, residency of models. Must not know images or a transport."""
