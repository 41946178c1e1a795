"""Fork servers of a service that is about to start: they import PyTorch while this process imports its own modules.

command ─► prepared ─► app.cli, app.main ─► app.fleet.process and app.decoding.pool, which take them
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from anychip_base.interpreter import bare_environment
from app.processes.fork_server import discard_prepared, prepare

log = logging.getLogger("anychip.workers")

WORKERS = "app.worker.main:fork_server"
"""Entry point of the fork server of workers. If none was prepared, every worker is spawned."""
CONFINED = "app.worker.main:bare_fork_server"
"""Entry point of the fork server of confined workers: an interpreter in a bare environment."""
DECODERS = "app.decoder.main:main"
_LIBRARIES = "app.worker.main:import_libraries", "app.decoder.main:import_libraries"
_COMMANDS, _HELP = {"serve", "demo"}, {"-h", "--help"}


@contextlib.contextmanager
def prepared(words: Sequence[str]) -> Iterator[None]:
    """Have the fork servers import their libraries, once for all, if `words` begin with the name of a command that
    serves. Within, a service takes those that it needs; the others end with it.
    """
    if not {*words[:1]} & _COMMANDS or {*words} & _HELP:
        yield
        return
    try:
        prepare(_LIBRARIES, CONFINED, bare_environment(), WORKERS, DECODERS)
    except OSError as error:
        log.warning("the processes that fork others cannot be started yet: %s", error)
    try:
        yield
    finally:
        for main in (DECODERS, WORKERS, CONFINED):
            discard_prepared(main)
