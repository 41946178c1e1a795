"""Parts of `anychip predict`: its files, answers by a device here or by a service, and drawings."""
