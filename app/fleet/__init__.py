"""The server's side of the workers: what is sent to which, what becomes of it, and how a worker is replaced.

Must not know requests or a transport; which item runs next is app.scheduling's business.
"""
