"""Silent connections, many of them, from another address."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
from collections.abc import Iterator, Sequence

import httpx

ATTACKER, OTHER = "127.0.0.3", "127.0.0.2"
"""Addresses of this machine other than the tests' own."""


@contextlib.contextmanager
def connections(port: int, count: int, source: str = ATTACKER) -> Iterator[list[socket.socket]]:
    """Open so many connections at once, without waiting for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 1000), hard))
    begun: list[socket.socket] = []
    try:
        for _ in range(count):
            each = socket.socket()
            each.setblocking(False)
            each.bind((source, 0))
            each.connect_ex(("127.0.0.1", port))
            begun.append(each)
        yield begun
    finally:
        for each in begun:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def until_ended(begun: Sequence[socket.socket], count: int, within_s: float) -> list[bytes]:
    """Return the last words of connections that the server ends, as soon as there are so many; "" for none."""
    said: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        for each in begun:
            selector.register(each, selectors.EVENT_READ)
        while len(said) < count:
            ready = selector.select(within_s)
            assert ready, f"only {len(said)} of {count} have ended"
            for key, _ in ready:
                selector.unregister(key.fileobj)
                try:
                    said.append(key.fileobj.recv(1000))  # type: ignore[union-attr]
                except OSError:
                    said.append(b"")
    return said


def client_elsewhere(url: str, **options: object) -> httpx.Client:
    """Make a client at another address than the tests' own, with a new connection for each request."""
    verify = options.pop("verify", True)
    transport = httpx.HTTPTransport(
        local_address=OTHER,
        verify=verify,  # type: ignore[arg-type]
        limits=httpx.Limits(max_keepalive_connections=0),
    )
    return httpx.Client(base_url=url, transport=transport, timeout=60, **options)  # type: ignore[arg-type]
