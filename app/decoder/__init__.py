"""Decoder process, from inside. Must not know requests or queues. Clients' bytes are parsed here and nowhere else."""
