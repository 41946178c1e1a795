"""Whether the service, or one of its models, can be asked now, and if not, why.

Owns: what health checks are told. A model's own state is app.fleet.readiness'. Must not know a transport. The
service is ready when every model that it was started with is (docs/reliability.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from app.errors import ServiceError
from app.fleet.readiness import ModelState
from app.fleet.readiness import Readiness as ModelReadiness
from app.fleet.served_model import ServedModel


class ServiceReadiness:
    """`names`: the models that clients see."""

    def __init__(self, models: ModelReadiness, names: Iterable[str]) -> None:
        self._models, self._names = models, tuple(names)
        self.draining = False
        """The service is shutting down; it still takes requests."""
        self.refusing = False
        """It takes none any more."""

    def why_not(self, served: ServedModel | None = None) -> str:
        """Why the service, or a model, is not ready, in one sentence; empty when it is."""
        if self.draining:
            return "the service is shutting down"
        if served is not None:
            return self._models.reason(served.model.name)
        states = {name: self._models.state(name) for name in self._names}
        unloaded = [name for name, state in states.items() if state is ModelState.UNLOADED]
        missing = [name for name, state in states.items() if not (state is ModelState.READY or name in unloaded)]
        reasons = []
        if missing:
            reasons.append(f"no worker is ready for {', '.join(missing)}: {self._models.replica_reasons()}")
        if unloaded:
            reasons.append(f"unloaded: {', '.join(unloaded)}; POST /v2/repository/models/NAME/load loads a model again")
        return "; ".join(reasons)

    def check(self, served: ServedModel | None = None) -> None:
        """Raises DRAINING or NOT_READY, with the reason, unless the service, or a model, is ready."""
        reason = self.why_not(served)
        if reason:
            raise ServiceError("DRAINING" if self.draining else "NOT_READY", reason, retry_after_s=1)
