"""HTTP: from bytes on a connection to a call of the service, and its answer back.

Must not know how images become predictions, nor how gRPC does the same; app.protocols has what both share.
"""
