"""Models that come and go beside those that serve: a thread that loads and unloads them, one at a time.

Owns: that thread, and what it has taken and given back. The thread that serves asks, and never waits. Must not know why
a model comes or goes.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import sys
import threading
from collections import deque
from dataclasses import replace

from app.worker.link import ServerLink
from app.worker.load import LoadedDevice, WorkerModel, load_model
from app.worker.messages import ModelLoaded, ModelUnloaded
from backends import DeviceLostError

_SWITCH_INTERVAL_S = 1e-3
"""What the thread that serves waits at most for the interpreter while this one runs Python; it is 5 ms otherwise."""
_LESS_URGENT = 10
_STOP_S = 2.0
_LONGEST_REASON = 1000

log = logging.getLogger("anychip.worker")


class Loader:
    """Of one device. The thread begins with the first model."""

    def __init__(self, loaded: LoadedDevice, link: ServerLink) -> None:
        self._loaded, self._link = loaded, link
        self._work: queue.SimpleQueue[tuple[int, WorkerModel | None] | None] = queue.SimpleQueue()
        self._more: deque[int] = deque()
        self._lost: list[DeviceLostError] = []
        self._thread: threading.Thread | None = None

    def load(self, index: int) -> None:
        """Load the model of this number; ModelLoaded is sent when it serves, or why it does not."""
        self._ask(index, None)

    def unload(self, index: int) -> None:
        """From now on the model of this number does not serve; ModelUnloaded is sent when its memory is free."""
        self._ask(index, self._loaded.models.pop(index))

    def more_bytes(self) -> int:
        """What models take more than when this was asked before. Raises DeviceLostError, which a load has met."""
        if self._lost:
            raise self._lost[0]
        return sum(self._more.popleft() for _ in range(len(self._more)))

    def stop(self) -> None:
        """Begin nothing more, and wait a moment for what has begun."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_STOP_S)

    def _ask(self, index: int, goes: WorkerModel | None) -> None:
        if self._thread is None:
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
            self._thread.start()
        self._work.put((index, goes))

    def _run(self) -> None:
        # Threads that engines of a CPU begin here compute for all models, and would keep this.
        if not self._loaded.backend.facts.host_memory:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LESS_URGENT)
        with self._loaded.backend._beside(self._loaded.device):
            self._work_off()

    def _work_off(self) -> None:
        while (work := self._work.get()) is not None:
            index, goes = work
            del work
            try:
                if goes is None:
                    self._link.send(self._loaded_model(index))
                else:
                    goes.executable.close()
                    self._more.append(-goes.memory_bytes)
                    goes = None
                    gc.collect()
                    self._loaded.backend.release_cache(self._loaded.device)
                    self._link.send(ModelUnloaded(index))
            except DeviceLostError as error:
                self._lost.append(error)
                return
            except OSError:  # The server is gone: the other thread hears it, too.
                return

    def _loaded_model(self, index: int) -> ModelLoaded:
        """Raises DeviceLostError."""
        loaded = self._loaded
        # What is loaded on demand is what is ready in seconds: nobody may wait for minutes.
        load = replace(loaded.load, quick=True)
        plan = load.plans[index]
        assert plan.model is not None
        try:
            model = load_model(load, plan, plan.model, loaded.backend, loaded.decoder)
        except DeviceLostError:
            raise
        except Exception as error:  # Whatever a driver or a file makes of it: the others serve on.
            log.warning("%s cannot be loaded: %s", plan.model.name, error, exc_info=True)
            reason = f"{error}"[:_LONGEST_REASON] or type(error).__name__
        else:
            self._more.append(model.memory_bytes)
            loaded.models[index] = model
            return ModelLoaded(index, model.said())
        # Not inside `except`: the traceback still holds what the failed load had allocated.
        gc.collect()
        loaded.backend.release_cache(loaded.device)
        return ModelLoaded(index, None, reason)
