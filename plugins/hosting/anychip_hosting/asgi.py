"""The service as an ASGI application that starts and stops with its host: Ray Serve, or another HTTP server.

    ANYCHIP_MODELS=resnet50 uvicorn --factory anychip_hosting.asgi:create

Without a host, `anychip serve` listens and handles signals, and leaves load balancers time while it drains.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from app.config import Settings

if TYPE_CHECKING:
    from models import Model


def create(settings: Settings | None = None, held: object = None) -> Hosted:
    """Create the application with these settings, else those of environment and file; opens the models.

    `held` is kept as long as the application, such as the lock on a device. Raises ModelError.
    """
    # Before torch is imported anywhere: a vendor plugin without its driver would make that import fail.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from app.serving.opening import Opening

    settings = settings or Settings()  # type: ignore[call-arg]  # mypy sees no defaults in the fields.
    return Hosted(settings, Opening().models(settings), held)


class Hosted:
    """The application over a service that lives from its host's startup to its shutdown; the host uses lifespan."""

    def __init__(self, settings: Settings, models: Sequence[Model], held: object = None) -> None:
        self._settings = settings
        self._models = models
        self._held = held
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or run the lifespan."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if self._app is None:
            raise RuntimeError("anychip has not been started: its host must speak the lifespan protocol")
        await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        from app.main import create_app, drain
        from app.observability.tracing import from_settings
        from app.serving.service import Service

        await receive()  # lifespan.startup
        tracing = from_settings(self._settings)
        service = Service(self._settings, self._models, tracing)
        try:
            await service.start()
            self._app = create_app(service, hosted=True)
            await send({"type": "lifespan.startup.complete"})
            await receive()  # lifespan.shutdown
            await drain(service, self._settings, asyncio.Event())
        finally:
            await service.stop()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
        await send({"type": "lifespan.shutdown.complete"})
