"""Readiness of models: one state per model, and the reason if it is not ready.

Owns: that state. It is computed from the workers, the replicas and the model's `unloaded` at each call, so it is never
out of date. Must not know HTTP, nor whether the service is shutting down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from app.errors import ServiceError
from app.fleet.process import Replica
from app.fleet.submission import ModelPool
from app.link import ModelState
from app.processes.place import PlaceStatus
from app.scheduling.scheduler import Scheduler

_WITHOUT = (PlaceStatus.BROKEN, PlaceStatus.QUARANTINED, PlaceStatus.STOPPED)
"""Replicas without a worker and without one that starts soon."""


class Readiness:
    """The states of all models. `replicas` may still grow."""

    def __init__(self, models: Mapping[str, ModelPool], scheduler: Scheduler[Any], replicas: Sequence[Replica]) -> None:
        self._models, self._scheduler, self._replicas = models, scheduler, replicas
        self.on_demand: Collection[str] = ()
        """Names of the models that are loaded on demand, and of their forms."""

    def state(self, name: str) -> ModelState:
        """Return the state of a model, or of one of its forms."""
        if self.is_served(name):
            return ModelState.READY
        if self._models[name].shown.unloaded:
            return ModelState.UNLOADED
        if name in self.on_demand and any(each.child.is_ready for each in self._replicas_of(name)):
            return ModelState.ON_DEMAND
        starting = any(each.status not in _WITHOUT for each in self._replicas_of(name))
        return ModelState.STARTING if starting else ModelState.UNAVAILABLE

    def is_served(self, name: str) -> bool:
        """Return True if the state is READY: a worker takes requests. It costs less than to find the state."""
        return self._scheduler.serves(name) and not self._models[name].shown.unloaded

    def refuse_unless_served(self, name: str) -> None:
        """Raise NOT_READY if no worker serves the model and none is being started for it."""
        if self.is_served(name):
            return
        state = self.state(name)
        if not state.accepts_requests:
            self._models[name].metrics.rejected["not_ready"].inc()
            retry_after_s = 60 if state is ModelState.UNLOADED else 1
            raise ServiceError("NOT_READY", self.reason(name), retry_after_s=retry_after_s)

    def reason(self, name: str) -> str:
        """Return why the model is not ready, in one sentence; empty if it is."""
        state = self.state(name)
        if state.is_ready:
            return ""
        if state is ModelState.UNLOADED:
            shown = self._models[name].shown
            lost, load = shown.lost and f": {shown.lost}", f"POST /v2/repository/models/{shown.model.name}/load"
            return f"{shown.model.name} is unloaded{lost}; {load} loads it"
        return f"no worker is ready for {name}: {_reasons(self._replicas_of(name))}"

    def loaded(self, names: Sequence[str]) -> list[str]:
        """Return the names whose model a worker has loaded; that worker may not be ready yet."""
        return [name for name in names if any(self._models[name].shown.index in each.loaded for each in self._replicas)]

    def replica_reasons(self) -> str:
        """Return what is wrong with the replicas that have no worker; empty if nothing is known."""
        return _reasons(self._replicas)

    def _replicas_of(self, name: str) -> list[Replica]:
        index = self._models[name].shown.index
        return [each for each in self._replicas if each.plan.has(index)]


def _reasons(replicas: Sequence[Replica]) -> str:
    return "; ".join(f"{each.device} is {each.status.value}: {each.reason}" for each in replicas if each.reason)
