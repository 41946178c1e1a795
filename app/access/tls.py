"""TLS by files, for HTTP and gRPC: read again when they change.

A file that cannot be used (a certificate is there before its key, say) changes nothing until it can. An authority that
is taken out of its file is trusted until the service starts again: OpenSSL can only add one.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from app.access.keys import stamp
from app.config import Settings

log = logging.getLogger("anychip.access")

LOOK_AGAIN_S = 2.0


class Tls:
    """TLS of one service. `context`: for asyncio's servers; `seen`: another value once the files have changed."""

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        """Load the files. `client_authority`: clients need a certificate from it. Raises OSError with one sentence."""
        self.certificate, self.key, self.client_authority = certificate, key, client_authority
        self.seen = self._stamp()
        self.context = self._made()

    @classmethod
    def of(cls, settings: Settings) -> Tls | None:
        """Load the files that the settings name; None if they name none. Raises OSError."""
        if not settings.tls_cert and not settings.tls_key:
            if settings.tls_client_ca:
                raise OSError("--tls-client-ca needs --tls-cert and --tls-key")
            return None
        if not settings.tls_cert or not settings.tls_key:
            raise OSError("--tls-cert and --tls-key need each other")
        authority = Path(settings.tls_client_ca) if settings.tls_client_ca else None
        return cls(Path(settings.tls_cert), Path(settings.tls_key), authority)

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_authority is not None:
                context.load_verify_locations(self.client_authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
            reason = error.strerror if isinstance(error, FileNotFoundError) else error
            raise OSError(f"TLS cannot be had from {self.certificate} and {self.key}: {reason}") from None

    def refresh(self) -> None:
        """Read the files again if they have changed."""
        seen = self._stamp()
        if seen == self.seen:
            return
        self.seen = seen
        try:
            self._made()  # First in its own context: a certificate without its key would spoil the one in use.
            self._load(self.context)
        except OSError as error:
            log.error("the certificate stays as it was: %s", error)
        else:
            log.info("the certificate was read again from %s", self.certificate)

    async def keep_fresh(self) -> None:
        """Refresh every two seconds, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            self.refresh()

    def _stamp(self) -> tuple[tuple[int, ...], ...]:
        return tuple(stamp(path) for path in (self.certificate, self.key, self.client_authority) if path is not None)
