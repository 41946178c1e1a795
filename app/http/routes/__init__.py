"""HTTP only: what a request says, and what the answer looks like on the wire."""
