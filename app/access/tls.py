"""TLS by files, for HTTP and gRPC: read again when they change.

Owns: the certificate, its key and the authority that clients' certificates are from. Must not know what is asked.

A file that cannot be used (a certificate is there before its key, say) changes nothing until it can. An authority that
is taken out of its file is trusted until the service starts again: OpenSSL can only add one.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from app.access.stamp import stamp
from app.config import Settings

log = logging.getLogger("anychip.access")

LOOK_AGAIN_S = 2.0


class Tls:
    """Of one service. `context`: for asyncio's servers."""

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None) -> None:
        """`client_authority`: clients need a certificate from it. Raises OSError with one sentence."""
        self._certificate, self._key, self._client_authority = certificate, key, client_authority
        self._seen = self._stamp()
        self.context = self._made()

    @classmethod
    def of(cls, settings: Settings) -> Tls | None:
        """What the settings name; None where they name nothing. Raises OSError."""
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
            context.load_cert_chain(self._certificate, self._key)
            if self._client_authority is not None:
                context.load_verify_locations(self._client_authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
            reason = error.strerror if isinstance(error, FileNotFoundError) else error
            raise OSError(f"TLS cannot be had from {self._certificate} and {self._key}: {reason}") from None

    def refresh(self) -> bool:
        """Read the files again where they have changed; whether they are in use now."""
        seen = self._stamp()
        if seen == self._seen:
            return False
        try:
            self._made()  # In a context of its own first: a certificate without its key would spoil the one in use.
            self._load(self.context)
        except OSError as error:
            log.error("the certificate stays as it was: %s", error)
            return False
        finally:
            self._seen = seen
        log.info("the certificate was read again from %s", self._certificate)
        return True

    async def keep_fresh(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            self.refresh()

    def grpc_credentials(self) -> Any:
        """For a gRPC server. Raises OSError."""
        import grpc

        seen = self._seen

        def configuration() -> Any:
            authority = self._client_authority.read_bytes() if self._client_authority is not None else None
            pair = self._key.read_bytes(), self._certificate.read_bytes()
            return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)

        def fetched() -> Any:
            """Asked before each handshake, in a thread of gRPC's; None: nothing is new."""
            nonlocal seen
            if seen == self._seen:
                return None
            seen = self._seen
            try:
                return configuration()
            except OSError as error:
                log.error("gRPC's certificate stays as it was: %s", error)
                return None

        required = self._client_authority is not None
        return grpc.dynamic_ssl_server_credentials(configuration(), fetched, required)

    def _stamp(self) -> tuple[tuple[int, ...], ...]:
        return tuple(stamp(path) for path in (self._certificate, self._key, self._client_authority) if path is not None)
