"""The limit of files that this process may have open.

Owns: the limit of the system, raised for the connections that there may be. Must not know what they are.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("anychip")

_OTHERS = 256
"""Descriptors for processes, files and the administration's connections: clients leave them alone."""


def make_room(connections: int, descriptors: int = 1) -> int:
    """Raise the limit for the descriptors that connections may need; return how many connections there may be.

    `descriptors`: the most that one takes.
    """
    wanted = (descriptors + 1) * connections + _OTHERS  # Ended ones stay open for a moment.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    room = min(connections, max(allowed // 2, allowed - _OTHERS) // descriptors)
    if room < connections:
        log.warning("only %d files may be open here: %d connections, not %d (ulimit -n)", allowed, room, connections)
    return room
