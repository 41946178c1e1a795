"""Parts that processes on both sides share: the arena, channels, packed objects; the supervisor of child processes.

Must not know what is sent, nor what a process is for.
"""
