"""What runs next, where, and what becomes of it: the queue, batches, latencies, the dispatcher, hand-overs.

Must not know encoded images, predictions or a transport.
"""
