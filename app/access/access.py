"""Admission of callers: a caller may ask for some things, and is refused others.

    bind, Host, Origin ─► key ─► role ─► Caller

Owns: this order and the sentences of a refusal, for every transport. Must not know frameworks, nor anything of a
request but its `Need`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.access.addresses import Hosts, client_of, is_loopback
from app.access.keys import CallerLimits, Key, Keys, KeysError, Role, client_limits
from app.access.rules import Bind, Need
from app.config import split
from app.errors import ServiceError

if TYPE_CHECKING:
    from app.config import Settings


log = logging.getLogger("anychip.access")


@dataclass(eq=False, slots=True)
class Caller:
    """Caller of the service. `name`: its shares count under it, a key's name or `client_of` its address; `key`: the
    key's name, "" without one; `sees_others`: it may see the list of other clients.
    """

    name: str
    limits: CallerLimits
    key: str = ""
    sees_others: bool = True

    def check_priority(self, priority: int) -> None:
        """Raise FORBIDDEN for a priority above the caller's limit."""
        if priority > self.limits.priority:
            message = f"a priority of {priority} is more than the {self.limits.priority} that this key may have"
            raise ServiceError("FORBIDDEN", message)


_WANTED = frozenset((b"host", b"authorization", b"origin", b"x-api-key"))
_LABELLING_KEY = b"token"
"""Header of X-AnyLabeling's key."""
HIGHEST_PRIORITY = 100
"""Highest priority of every client if there are no keys."""


class KeyForbiddenError(ServiceError):
    """FORBIDDEN: a known key may not ask for this."""

    def __init__(self, key: str) -> None:
        super().__init__("FORBIDDEN", f"the key {key} may not administer this service")
        self.key = key


def check_exposure(settings: Settings) -> None:
    """Raise KeysError if keys would cross the network to other machines in plain text."""
    if settings.api_keys_file and not (settings.insecure_keys or settings.tls_cert or is_loopback(settings.host)):
        raise KeysError(
            f"with --host {settings.host}, keys would cross the network in plain text; use --tls-cert and --tls-key, "
            "or listen on loopback behind a proxy that has TLS, or say --insecure-keys true behind a proxy that has it"
        )


def check_secrets(settings: Settings, *, programs: bool) -> None:
    """Check that no keys lie in the cache, which workers may write to: KeysError if files that are `programs` are
    served, else a warning.
    """
    cache = settings.cache_dir.expanduser().resolve()
    for option, name in (("--api-keys-file", settings.api_keys_file), ("--tls-key", settings.tls_key)):
        if name and Path(name).expanduser().resolve().is_relative_to(cache):
            reason = f"{option} lies in --cache-dir ({cache}), where workers write: keep it where they need not"
            if programs:
                raise KeysError(f"{reason}; no .pt2 or .ts file is served beside it")
            log.warning("%s", reason)


class Access:
    """Access to one service."""

    def __init__(self, settings: Settings, *, hosted: bool = False) -> None:
        """Read the keys. `hosted`: others listen for the service, at unknown addresses. Raises KeysError."""
        self._settings = settings
        self.keys = Keys(Path(settings.api_keys_file).expanduser()) if settings.api_keys_file else None
        limits = client_limits(settings.client_limits)
        self._wanted = _WANTED | {_LABELLING_KEY} if "x-anylabeling" in split(settings.compat) else _WANTED
        self._limits = limits if self.keys else replace(limits, priority=HIGHEST_PRIORITY)
        self._callers: dict[str, tuple[Key, Caller]] = {}  # By key, as long as the file has it unchanged.
        # A rebound web page has no key. Names are checked on loopback all the same: a service there is meant for
        # this machine alone.
        checked = self.keys is None or (not hosted and is_loopback(settings.host))
        self._hosts: dict[Bind, Hosts] = {
            "public": Hosts(settings.host_names, checked=checked),
            "admin": Hosts(settings.host_names, checked=True),
        }
        if self.keys is None and "*" in settings.host_names:
            log.warning(
                "every Host is answered (--allowed-hosts *) and there are no keys: a web page that gives its own name "
                "this service's address can read the answers"
            )

    def admit(self, need: Need, bind: Bind, headers: Iterable[tuple[bytes, bytes]], address: str) -> Caller:
        """Return the caller, if it is admitted. `headers`: HTTP's or gRPC's metadata, names in lower case.

        Raises FORBIDDEN, UNAUTHORIZED.
        """
        host = origin = authorization = sent = b""
        for name, value in headers:
            if name in self._wanted:
                if name == b"host":
                    host = value
                elif name == b"authorization":
                    authorization = value
                elif name == b"origin":
                    origin = value
                elif name != _LABELLING_KEY or not sent:
                    sent = value
        if not self._hosts[bind].accepts(host):
            message = (
                "the Host header names another service; addresses and localhost are answered, and the names in "
                "--allowed-hosts (ANYCHIP_ALLOWED_HOSTS)"
            )
            raise ServiceError("FORBIDDEN", message)
        if bind == "admin" or need == "admin":
            self._check_administration(need, bind, origin)
        if self.keys is None or need == "open" or (need == "metrics" and self._settings.metrics_without_key):
            return Caller(client_of(address), self._limits)
        if not sent and authorization[:7].lower() == b"bearer ":
            sent = authorization[7:].strip()
        return self._identified(self.keys, sent, "admin" if need == "admin" else "infer")

    def counts(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return True if the caller's requests in flight are limited; False if it is refused."""
        if self.keys is None:
            return self._limits.any
        with contextlib.suppress(ServiceError):
            return self.admit("infer", "public", headers, "").limits.any
        return False

    def _check_administration(self, need: Need, bind: Bind, origin: bytes) -> None:
        if origin:
            raise ServiceError("FORBIDDEN", "no web page may administer this service: the request has an Origin")
        if need == "admin" and bind == "public" and self._settings.admin != "port":
            message = "this is asked of the administration's own address (--admin), not here"
            raise ServiceError("FORBIDDEN", message)

    def _identified(self, keys: Keys, sent: bytes, role: Role) -> Caller:
        if not sent:
            message = "this service wants an API key; send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
            raise ServiceError("UNAUTHORIZED", message, headers=[(b"www-authenticate", b"Bearer")])
        key = keys.find(sent)
        if key is None:
            headers = [(b"www-authenticate", b'Bearer error="invalid_token"')]
            raise ServiceError("UNAUTHORIZED", "this API key is not known here", headers=headers)
        if role == "admin" and key.role != "admin":
            raise KeyForbiddenError(key.name)
        known = self._callers.get(key.name)
        if known is None or known[0] is not key:
            known = self._callers[key.name] = (
                key,
                Caller(f"key:{key.name}", key.limited(self._limits), key.name, key.role == "admin"),
            )
        return known[1]
