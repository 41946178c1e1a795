"""Tasks: what instances of each have, one file a task. Must not know files or networks."""
