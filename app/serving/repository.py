"""Loads and unloads of models while the service runs.

    load:   read the file ─► hand over to workers that have it ─► take requests
    unload: refuse requests ─► answer those under way ─► hand over to workers without it

Owns: the set of models that all workers hold after each change, one change at a time. app.fleet.handover replaces a
worker without losing a request. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from app import clock
from app.config import Settings
from app.errors import ServiceError, invalid_request
from app.fleet.fleet import Fleet
from app.fleet.submission import ModelPool
from app.precision.described import Described
from app.processes.place import ChildStartError
from app.serving.opening import Opening, OpeningError
from models import Model, ModelError, NormalisedModel, PixelModel

log = logging.getLogger("anychip.service")

_CHANGES_PER_MINUTE = 12
"""Most loads and unloads that may begin in a minute, before 429."""


class Repository:
    """Repository of the models that clients see, by name."""

    def __init__(self, settings: Settings, models: Mapping[str, ModelPool], fleet: Fleet) -> None:
        self._settings, self._models, self._fleet = settings, models, fleet
        self._lock = asyncio.Lock()
        self._begun_s = deque[float](maxlen=_CHANGES_PER_MINUTE)
        """Start times of the last changes."""
        self._changes: set[asyncio.Task[None]] = set()

    async def load(self, name: str) -> None:
        """Read a model's weights again and hand over to workers that have them (app.link.Administration.load)."""
        await self._finished(self._load(self._models[name]))

    async def _load(self, served: ModelPool) -> None:
        async with self._begun():
            model = await self._read(served)
            await self._hand_over({served.model.name: model}, "load")
            served.unloaded, served.lost = False, ""

    async def unload(self, name: str) -> None:
        """Refuse new requests, answer those under way, free the memory (app.link.Administration.unload)."""
        await self._finished(self._unload(self._models[name]))

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

    async def _finished(self, change: Coroutine[Any, Any, None]) -> None:
        """Wait for a change in a task of its own: a client that leaves must not leave half a change behind."""
        task = asyncio.create_task(change, name="repository")
        self._changes.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("a change of the repository failed: %s", task.exception())  # Whoever waits for it hears it, too.

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
