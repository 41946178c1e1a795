"""The inside of the process that owns a device: load, run, measure, give memory back. Must not know queues."""
