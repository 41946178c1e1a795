"""One request from its body to its answer, and the models that are served.

Must not know a transport, nor how workers are kept.
"""
