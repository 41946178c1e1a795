"""One request, over any transport: its context, budget, deadline and steps. Must not know bytes on a connection."""
