"""Networks from files that carry their own graph. Must not run them outside of the child that tries them."""
