"""Networks from files that carry their own graph.

Must not run their content outside of the child that tries them.
"""
