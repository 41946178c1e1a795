"""Names of clients by their addresses, and names in a Host header that mean this service.

Owns: one name for one client, over any transport; and the rule against DNS rebinding. With rebinding a page in a
browser gives its own name the address of this service and then reads its answers as its own. Such a request has that
name as its Host. Must not know transports: gRPC owns the form of an address in its `peer`.
"""

from __future__ import annotations

import functools
import ipaddress
import re


def client_of(address: str) -> str:
    """Return the client that an address without its port belongs to.

    An IPv6 address counts as its /64: a host is given all of it, and could use one address after the other. An IPv4
    address written in IPv6 counts as itself. Any other text ("", a path) is its own name.
    """
    return _network_of(address) if ":" in address else address


@functools.lru_cache(1024)
def _network_of(address: str) -> str:
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))


_PORT = re.compile(rb"(.*?)(?::\d{0,5})?")
_KNOWN_AT_MOST = 1024


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
