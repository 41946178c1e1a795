"""Admission of callers, under the names that they are counted by, and the limits of what each has in flight.

    bind, Host, Origin ─► key ─► role ─► Caller ─► its lease: requests, bytes, images, pixels

The Host is checked against DNS rebinding, with which a page gives its own name this service's address to read answers.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from app import clock
from app.access.keys import CallerLimits, Key, Keys, KeysError, Role, client_limits
from app.access.rules import Bind, Need
from app.config import Settings
from app.config.values import split
from app.errors import ServiceError
from app.pace import Pace

log = logging.getLogger("anychip.access")

_PORT = re.compile(rb"(.*?)(?::\d{0,5})?")
_KNOWN_AT_MOST = 1024
_WANTED = frozenset((b"host", b"authorization", b"origin", b"x-api-key"))
_LABELLING_KEY = b"token"
"""Header of X-AnyLabeling's key."""
HIGHEST_PRIORITY = 100
"""Highest priority of every client if there are no keys."""


@functools.lru_cache(1024)
def client_of(address: str) -> str:
    """Return the client that an address without its port belongs to.

    An IPv6 address counts as its /64: a host is given all of it, and could use one address after the other. An IPv4
    address written in IPv6 counts as itself. Any other text ("", a path) is its own name.
    """
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))


class Hosts:
    """Names that mean this service."""

    def __init__(self, names: tuple[str, ...], *, checked: bool) -> None:
        """Keep `names`: `*` is all of them, `*.example.com` those below.

        Localhost and addresses are this service's always, as rebinding needs a name. `checked`: without any `names`,
        other names are refused.
        """
        self._every = "*" in names or not (names or checked)
        self._exact = {name.lower() for name in names if not name.startswith("*")}
        self._below = tuple(name[1:].lower() for name in names if name.startswith("*."))
        self._known: set[bytes] = set()  # Headers that were found good.

    def accepts(self, header: bytes) -> bool:
        """Return True if a Host header names this service. A request without one (HTTP/1.0) is no browser's."""
        if self._every or not header or header in self._known:
            return True
        if not self._names(header):
            return False
        if len(self._known) < _KNOWN_AT_MOST:
            self._known.add(header)
        return True

    def _names(self, header: bytes) -> bool:
        found = _PORT.fullmatch(header)
        host = found[1].decode("latin-1").lower().rstrip(".") if found else ""
        if host in self._exact or host.endswith(self._below):
            return True
        return host == "localhost" or host.endswith(".localhost") or is_address(host)


def is_address(host: str) -> bool:
    """Return True if a host is an IP address, in brackets if it has colons."""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if a service that listens on this host hears this machine alone."""
    if host == "localhost":
        return True
    return is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback


class Caller(msgspec.Struct, eq=False):
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
        # A rebound web page has no key. Names are checked on loopback, too: a service there is for this machine alone.
        checked = self.keys is None or (not hosted and is_loopback(settings.host))
        names = split(settings.allowed_hosts)
        self._hosts: dict[Bind, Hosts] = {
            "public": Hosts(names, checked=checked),
            "admin": Hosts(names, checked=True),
        }
        if self.keys is None and "*" in names:
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
            if origin:
                raise ServiceError("FORBIDDEN", "no web page may administer this service: the request has an Origin")
            if bind == "public" and self._settings.admin != "port":
                message = "this is asked of the administration's own address (--admin), not here"
                raise ServiceError("FORBIDDEN", message)
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


@dataclass(eq=False, slots=True)
class ClientUsage:
    """Counts of one caller's requests in flight; `pace`: of its images, if they have a rate."""

    pace: Pace | None
    requests: int = 0
    bytes: int = 0
    pixels: int = 0


class ClientLimits:
    """Limits of all callers that have something in flight, or a rate that is remembered."""

    def __init__(self) -> None:
        self._usages: dict[str, ClientUsage] = {}

    def usage(self, caller: Caller) -> ClientUsage:
        """Return the counts of a caller, made if need be."""
        usage = self._usages.get(caller.name)
        if usage is None:
            rate = caller.limits.images_per_s
            usage = ClientUsage(Pace(rate * 60, burst=max(1.0, rate)) if rate else None)
            self._usages[caller.name] = usage
        return usage

    def ended(self, caller: Caller) -> None:
        """Forget a caller that has nothing in flight: addresses are the clients', and must not pile up."""
        usage = self._usages[caller.name]
        if usage.requests == 0 and (usage.pace is None or usage.pace.wait_s(clock.monotonic(), math.inf) <= 0):
            del self._usages[caller.name]


class ClientLease:
    """Share that one request holds of its caller's limits, until its context ends. Entering that raises QUEUE_FULL."""

    __slots__ = ("_bytes", "_limits", "_pixels", "_usage", "caller")

    def __init__(self, limits: ClientLimits, caller: Caller) -> None:
        self.caller = caller
        self._limits = limits
        self._bytes = self._pixels = 0

    def __enter__(self) -> ClientLease:
        usage = self._usage = self._limits.usage(self.caller)
        most = self.caller.limits.requests
        if most and usage.requests >= most:
            self._limits.ended(self.caller)
            raise _enough(f"{most} requests at a time")
        usage.requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        usage = self._usage
        usage.requests -= 1
        usage.bytes -= self._bytes
        usage.pixels -= self._pixels
        if usage.requests == 0:
            self._limits.ended(self.caller)

    def hold_bytes(self, size: int) -> None:
        """Hold so many more bytes of the body. Raises QUEUE_FULL."""
        most = self.caller.limits.bytes
        if most and self._usage.bytes + size > most:
            raise _enough(f"{most} bytes of requests")
        self._usage.bytes += size
        self._bytes += size

    def admit_images(self, count: int) -> None:
        """Admit so many images to be computed. Raises QUEUE_FULL."""
        pace = self._usage.pace
        if pace is None:
            return
        wait_s = pace.wait_s(clock.monotonic(), count)
        if wait_s > 0:
            raise _enough(f"{self.caller.limits.images_per_s:g} images a second", math.ceil(wait_s))
        pace.take(count)

    @property
    def counts_pixels(self) -> bool:
        """True if the caller's pixels are limited: then an image's header is to be read before it is decoded."""
        return self.caller.limits.pixels > 0

    def hold_pixels(self, pixels: int) -> None:
        """Hold the pixels of an image that is to be decoded. Raises QUEUE_FULL."""
        most = self.caller.limits.pixels
        if most and self._usage.pixels + pixels > most:
            raise _enough(f"{most} pixels")
        self._usage.pixels += pixels
        self._pixels += pixels


def _enough(what: str, retry_after_s: int = 1) -> ServiceError:
    message = f"this client has all it may have, {what}; try again"
    return ServiceError("QUEUE_FULL", message, retry_after_s=retry_after_s)
