"""HTTP: from bytes on a connection to a call, and its answer back. Must not know how images become predictions."""
