"""Networks from files that carry their own graph.

Must not run what is in them outside of the child that tries them.
"""
