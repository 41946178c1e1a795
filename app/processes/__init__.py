"""Parts that processes share: arena, channels, packing, supervisor. Must not know what a process is for."""
