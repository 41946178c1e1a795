"""Whether a process of the service is stopped: by SIGSTOP or a debugger, so that it may go on at any moment.

Must not import anything: processes that start while a client waits import it as well.
"""

from __future__ import annotations


def is_stopped(pid: int | None) -> bool:
    """Whether somebody has stopped the process; False where there is none (any more)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # proc(5): the name is in brackets, the state follows.
    except OSError:
        return False
    return fields[:1] in (["T"], ["t"])
