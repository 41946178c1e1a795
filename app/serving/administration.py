"""Administration of the service: its state, and changes of its models; the owner's side of app.link.Administration.

    load:   read the file ─► hand over to workers that have it ─► take requests
    unload: refuse requests ─► answer those under way ─► hand over to workers without it

One change at a time. The service is ready when every model that it was started with is (docs/reliability.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from app import clock, link
from app.config import Settings
from app.core import ServedOn
from app.errors import ServiceError, invalid_request
from app.fleet.fleet import Fleet, reasons_of
from app.fleet.profiles import Profile
from app.fleet.submission import ModelPool
from app.link import Devices, DeviceStatus, ModelState, ReturnedBytes
from app.observability.triton_statistics import FIRST_VERSION
from app.precision.described import Described
from app.processes.place import ChildStartError
from app.serving.opening import Opening, OpeningError
from backends import Choice
from models import Model, ModelError, NormalisedModel, PixelModel

log = logging.getLogger("anychip.service")

_CHANGES_PER_MINUTE = 12
"""Most loads and unloads that may begin in a minute, before 429."""


class ServiceAdministration(link.Administration):
    """Administration of the models that clients see."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        models: Mapping[str, ModelPool],
        choice: Choice,
        profiles: Mapping[str, Profile],
    ) -> None:
        self._settings, self._fleet, self._models = settings, fleet, models
        self._choice, self._profiles = choice, profiles
        self.traffic: dict[str, Mapping[str, float]] = {}
        self.draining = False
        self._lock = asyncio.Lock()
        self._begun_s = deque[float](maxlen=_CHANGES_PER_MINUTE)

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
            progress = f"{len(loaded)} of {len(missing)} models are loaded ({', '.join(loaded)}); " if loaded else ""
            reasons.append(f"{progress}no worker is ready for {', '.join(missing)}: {reasons_of(self._fleet.replicas)}")
        if unloaded:
            reasons.append(f"unloaded: {', '.join(unloaded)}; POST /v2/repository/models/NAME/load loads a model again")
        return "; ".join(reasons)

    def state(self, model: str) -> tuple[ModelState, str]:  # noqa: D102
        return self._fleet.readiness.state(model), self._fleet.readiness.reason(model)

    def served_on(self, model: str) -> list[ServedOn]:  # noqa: D102
        return [*self._fleet.loaded(self._models[model])]

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
        names = {worker.device: worker.plan.device.name for worker in self._fleet.workers()}
        return Devices(
            devices=[
                DeviceStatus(
                    device=device,
                    name=names.get(device, ""),
                    vendor=self._choice.vendor,
                    simulated=self._choice.simulated,
                    ready=device in names,
                )
                for device in self._choice.devices
            ],
            refusals=dict(self._choice.refusals),
        )

    def workers(self) -> list[str]:  # noqa: D102
        return [worker.device for worker in self._fleet.workers()]

    async def load(self, model: str) -> None:  # noqa: D102
        await self._fleet.handovers.run(self._load(self._models[model]))

    async def unload(self, model: str) -> None:  # noqa: D102
        await self._fleet.handovers.run(self._unload(self._models[model]))

    async def release(self, device: str) -> dict[str, ReturnedBytes]:  # noqa: D102
        if device not in self._choice.devices:
            there_is = ", ".join(self._choice.devices)
            raise ServiceError("NOT_FOUND", f"there is no device {device!r} here; there is {there_is}")
        return await self._fleet.release(device)

    async def _load(self, served: ModelPool) -> None:
        async with self._begun():
            model = await self._read(served)
            await self._hand_over({served.model.name: model}, "load")
            served.unloaded, served.lost = False, ""

    @contextlib.asynccontextmanager
    async def _begun(self) -> AsyncIterator[None]:
        """Begin a change, unless another one runs or there were too many. Raises QUEUE_FULL."""
        if self._lock.locked():
            raise ServiceError("QUEUE_FULL", "another model is being loaded or unloaded; try again", retry_after_s=5)
        now_s = clock.monotonic()
        most = self._begun_s.maxlen
        if len(self._begun_s) == most and (wait_s := self._begun_s[0] + 60 - now_s) > 0:
            message = f"models are loaded and unloaded {most} times a minute at most; try again"
            raise ServiceError("QUEUE_FULL", message, retry_after_s=math.ceil(wait_s))
        self._begun_s.append(now_s)
        async with self._lock:
            yield

    async def _unload(self, served: ModelPool) -> None:
        async with self._begun():
            if served.unloaded:
                return
            served.unloaded = True
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(served.drained(), self._settings.drain_s)
                await self._hand_over({}, "unload")
            except BaseException:
                served.unloaded = False
                raise

    async def _read(self, served: ModelPool) -> Model:
        """Read the model again. Raises INVALID_REQUEST for what the file is, INTERNAL if no process can read it."""
        settings, old = self._settings, served.model
        try:
            if isinstance(old, Described):
                [model], _ = await Opening().apart(settings, old.name)
            else:
                [model] = await asyncio.to_thread(Opening().models, settings, old.name)
        except ModelError as error:
            raise invalid_request(f"{old.name} cannot be loaded: {error}") from None
        except OpeningError as error:
            log.error("load: %s could not be read: %s", old.name, error)
            raise ServiceError("INTERNAL", "the model could not be read; quote the request id") from None
        same = {name: getattr(old, name) for name in ("labels", "weights", "weights_file", "weights_sha256")}
        if isinstance(model, PixelModel) and isinstance(old, PixelModel):  # It may find other classes than before.
            same["file"] = replace(model.file, labels=old.file.labels, shapes=old.file.shapes)
        if replace(model, **same) != old:
            message = f"{old.name} now wants other inputs than before; restart the service"
            raise invalid_request(message)
        return model

    async def _hand_over(self, new: Mapping[str, Model], reason: str) -> None:
        """Hand over to workers with the models that are loaded, some of them new. Raises INTERNAL."""
        models: list[Model | None] = []
        for served in self._fleet.models.values():
            model = served.model
            name = model.image_model.name if isinstance(model, NormalisedModel) else model.name
            shown: Model = new.get(name) or self._models[name].model
            if isinstance(model, NormalisedModel) and isinstance(shown, PixelModel):
                shown = NormalisedModel.of(shown)  # With every model go its other forms.
            models.append(None if self._models[name].unloaded and name not in new else shown)
        try:
            await self._fleet.hand_over(models, reason)
        except ChildStartError as error:
            log.error("%s: no worker could take over: %s", reason, error)
            raise ServiceError("INTERNAL", "the model could not be replaced; quote the request id") from None
