"""Workers as the server sees them: dispatch, outcomes, replacement. Must not know requests, nor which item is next."""
