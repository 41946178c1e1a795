"""uvicorn's server, its settings and its listeners."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from app.access.tls import Tls
from app.config import Settings
from app.http.connection import too_many
from app.ingress.budget import Budget
from app.ingress.listener import Listener


def run(serving: Coroutine[Any, Any, None]) -> None:
    """Run a server to its end, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)


class Server(uvicorn.Server):
    """uvicorn, without its signal handling and its listening: the order of shutdown and the limits are ours."""

    def __init__(
        self,
        app: ASGIApp,
        kind: Callable[..., asyncio.BaseProtocol],
        settings: Settings,
        where: tuple[str, int],
        connections: Budget,
        *,
        hurry: asyncio.Event,
        tls: Tls | None,
    ) -> None:
        """Prepare to serve connections of this kind, at a host and port."""
        host, port = where
        config = uvicorn.Config(
            app,
            http=cast(Any, kind),  # uvicorn's types name only the unbuffered one.
            host=host,
            port=port,
            log_config=None,  # Our loggers format its lines.
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # Nothing here asks for a request's origin.
            lifespan="off",
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=5,
        )
        config.load()
        config.ssl = tls.context if tls else None
        super().__init__(config)
        self.connections, self.hurry, self.tls = connections, hurry, tls

    def become(self, app: ASGIApp, kind: Any) -> None:
        """Serve another application, by protocols of this kind, to clients that connect from now on."""
        self.config.loaded_app, self.config.http_protocol_class = app, kind

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; `sockets` is not used. Raises OSError."""
        self.servers: list[Any] = []  # Listeners that uvicorn closes at the end.
        try:
            await self.listen(self.config.port, self.config.host)
        except OSError as error:
            where = f"{self.config.host}:{self.config.port}"
            known = error.errno == errno.EADDRINUSE
            reason = "is another service there?" if known else error.strerror or str(error)
            message = f"cannot listen on {where}; {reason}"
            raise OSError(message) from None
        self.started = True

    def connection(self) -> Any:
        """Make a protocol for a new connection."""
        return cast(Any, self.config.http_protocol_class)(self.config, self.server_state, {})

    async def listen(self, port: int, host: str, *, reuse_port: bool = False) -> Listener:
        """Listen on a port, which may be a further one. Raises OSError."""
        listener = Listener(self.connection, self.connections, self.config.ssl, too_many())
        self.servers.append(listener)
        await listener.listen(host, port, reuse_port=reuse_port)
        return listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield
