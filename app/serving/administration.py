"""Administration of the service: its state, and changes of its models; the owner's side of app.link.Administration.

Owns: whether the service is draining, and the documents. app.fleet.readiness owns a model's state, and
app.serving.repository the loads and unloads. The service is ready when every model that it was started with is ready
(docs/reliability.md). Must not know a transport.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from app import link
from app.core import ServedOn
from app.errors import ServiceError, invalid_request
from app.fleet.fleet import Fleet
from app.fleet.profiles import Profile
from app.fleet.submission import ModelPool
from app.link import Devices, DeviceStatus, ModelState, ReturnedBytes
from app.observability.triton_statistics import FIRST_VERSION
from app.serving.repository import Repository
from backends import Choice


class ServiceAdministration(link.Administration):
    """Administration of the models that clients see."""

    def __init__(
        self,
        fleet: Fleet,
        models: Mapping[str, ModelPool],
        repository: Repository,
        choice: Choice,
        profiles: Mapping[str, Profile],
    ) -> None:
        self._fleet, self._models, self._repository = fleet, models, repository
        self._choice, self._profiles = choice, profiles
        self.traffic: dict[str, Mapping[str, float]] = {}
        self.draining = False

    def why_not(self, model: str = "") -> str:  # noqa: D102
        if self.draining:
            return "the service is shutting down"
        readiness = self._fleet.readiness
        if model:
            return readiness.reason(model)
        states = {name: readiness.state(name) for name in self._models}
        unloaded = [name for name, state in states.items() if state is ModelState.UNLOADED]
        missing = [name for name, state in states.items() if not (state.is_ready or name in unloaded)]
        reasons = []
        if missing:
            loaded = readiness.loaded(missing)
            told = f"{len(loaded)} of {len(missing)} models are loaded ({', '.join(loaded)}); " if loaded else ""
            reasons.append(f"{told}no worker is ready for {', '.join(missing)}: {readiness.replica_reasons()}")
        if unloaded:
            reasons.append(f"unloaded: {', '.join(unloaded)}; POST /v2/repository/models/NAME/load loads a model again")
        return "; ".join(reasons)

    def state(self, model: str) -> tuple[ModelState, str]:  # noqa: D102
        return self._fleet.readiness.state(model), self._fleet.readiness.reason(model)

    def served_on(self, model: str) -> list[ServedOn]:  # noqa: D102
        # The device as the server knows it: a worker may say anything.
        found = self._fleet.loaded(self._models[model])
        return [replace(loaded.served_on, device=device) for device, loaded in found]

    def profile_of(self, model: str) -> str:  # noqa: D102
        profile = self._profiles.get(model)
        return "" if profile is None else profile.name

    def set_traffic(self, model: str, shares: Mapping[str, float]) -> None:  # noqa: D102
        for version in shares:
            name = model if version == FIRST_VERSION else f"{model}@{version}"
            if name not in self._models:
                raise invalid_request(f"there is no version {version!r} of {model!r}")
            if shares[version] > 0 and self._fleet.replicas and not self.state(name)[0].accepts_requests:
                raise ServiceError("NOT_READY", f"{name} would answer nothing: {self.state(name)[1]}")
        if not all(share >= 0 for share in shares.values()) or not 0 < sum(shares.values()) < math.inf:
            raise invalid_request(f"{model}: shares are numbers from 0 on, and not all of them are 0")
        self.traffic[model] = dict(shares)

    def devices(self) -> Devices:  # noqa: D102
        ready = {worker.device: worker.ready for worker in self._fleet.workers() if worker.ready}
        return Devices(
            devices=[
                DeviceStatus(
                    device=device,
                    name=ready[device].device_name if device in ready else "",
                    vendor=self._choice.vendor,
                    simulated=self._choice.simulated,
                    ready=device in ready,
                )
                for device in self._choice.devices
            ],
            refusals=dict(self._choice.refusals),
        )

    def workers(self) -> list[str]:  # noqa: D102
        return [worker.device for worker in self._fleet.workers()]

    async def load(self, model: str) -> None:  # noqa: D102
        await self._repository.load(model)

    async def unload(self, model: str) -> None:  # noqa: D102
        await self._repository.unload(model)

    async def release(self, device: str) -> dict[str, ReturnedBytes]:  # noqa: D102
        if device not in self._choice.devices:
            there_is = ", ".join(self._choice.devices)
            raise ServiceError("NOT_FOUND", f"there is no device {device!r} here; there is {there_is}")
        return await self._fleet.release(device)
