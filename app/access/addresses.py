"""What an address is counted as: one client has one name, over whichever transport it comes.

Owns: this name. Must not know transports: how an address is written in gRPC's `peer` is gRPC's business.
"""

from __future__ import annotations

import functools
import ipaddress


def client_of(address: str) -> str:
    """The client that an address without its port belongs to.

    An IPv6 address counts as its /64, which is what a host is given, and so could use one after the other; an IPv4
    address written in IPv6 counts as itself. What is no address ("", a path) is its own name.
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
