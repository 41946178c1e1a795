"""The service's TLS for gRPC's C core, which needs the files' bytes and reads no file itself.

Owns: when the core gets them again. app.access.tls owns which files they are, and when they have changed.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc

from app.access.tls import Tls

log = logging.getLogger("anychip.access")


def credentials(tls: Tls) -> Any:
    """Return the credentials for a gRPC server. Raises OSError."""
    seen = tls.seen

    def configuration() -> Any:
        authority = tls.client_authority.read_bytes() if tls.client_authority is not None else None
        pair = tls.key.read_bytes(), tls.certificate.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)

    def fetched() -> Any:
        """Return a changed certificate; None: it is unchanged. gRPC asks before each handshake, in its own thread."""
        nonlocal seen
        if seen == tls.seen:
            return None
        seen = tls.seen
        try:
            return configuration()
        except OSError as error:
            log.error("gRPC's certificate stays as it was: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(configuration(), fetched, tls.client_authority is not None)
