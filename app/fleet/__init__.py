"""The server's side of the workers: dispatch of batches, their outcomes, and the replacement of workers.

Must not know requests or a transport, nor which item runs next: app.scheduling decides that.
"""
