"""Growth of batches: the sizes beyond the first ones from which a device gains, found by measurement.

    1,2,4,8 ─► does 8 pay over 4? ─► 16 ─► 32 ─► … till one does not pay, does not fit, or is refused

Owns: when a size pays, how much memory it may want, the order of the trials. Must not know how a network is made ready.
A start never waits for this: a worker that serves meanwhile says that it is staged, and one beside it tries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from backends import BackendError, DeviceLostError, Executable, LoadedNetwork, LoadReport, Memory

LARGEST = 128
GAIN = 1.1
"""Least ratio of images a second at a size to those at half of it."""
_LEAST_S = 1e-3  # A shorter batch gains nothing: the work around it takes as long.

log = logging.getLogger("anychip.worker")


def pays(latency_s: Mapping[int, float]) -> bool:
    """Return True if the largest size brings enough over the one below. `latency_s`: seconds a batch, by size."""
    sizes = sorted(latency_s)
    if len(sizes) < 2 or latency_s[sizes[-1]] < _LEAST_S:
        return False
    below, largest = sizes[-2:]
    return largest / latency_s[largest] >= GAIN * below / latency_s[below]


def has_room(memory: Memory) -> bool:
    """Return True if twice the batch fits: this worker then holds up to twice as much as now, and a successor too."""
    return 3 * memory.reserved <= memory.total - memory.used


def grown(
    report: LoadReport,
    latency_s: Mapping[int, float],
    make: Callable[[int], LoadedNetwork],
    measure: Callable[[Executable], Mapping[int, float]],
    memory: Callable[[], Memory],
) -> tuple[int, ...]:
    """Return the sizes to serve with: `latency_s`'s, and larger ones, each double the one before, while they pay.

    `make`: the network for batches of one more size alone, on the engine and in the precision of `report`; `measure`:
    seconds a batch. A trial's BackendError ends the growth, not the worker; DeviceLostError is raised.
    """
    found = dict(latency_s)
    while pays(found) and (size := 2 * max(found)) <= LARGEST:
        if not has_room(memory()):
            log.info("batches of %d are not tried: the memory is too small for two workers with them", size)
            return tuple(sorted(found))
        try:
            trial = make(size)
            try:
                if trial.report.precision != report.precision:
                    break
                found[size] = measure(trial.executable)[size]
            finally:
                trial.executable.close()
        except DeviceLostError:
            raise
        except BackendError as error:
            log.info("batches of %d are left out: %s", size, error)
            break
        log.info("batches of %d: %.1f images a second", size, size / found[size])
    largest = max(found)
    if largest not in latency_s and not pays(found):
        del found[largest]
    return tuple(sorted(found))
