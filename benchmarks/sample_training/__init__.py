"""Training that made the sample weights in models/sample."""
