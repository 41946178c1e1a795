"""What an address is counted as."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.access.addresses import client_of


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix:/run/socket", "unix:/run/socket"),
    ],
)
def test_a_client_has_one_name(address, client):
    assert client_of(address) == client


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_all_of_a_64_are_one_client_and_those_of_another_are_not(network, host, other):
    def address(above, below):
        return str(ipaddress.IPv6Address(above << 64 | below))

    assert client_of(address(network, host)) == client_of(address(network, other))
    if network >> 1 and host >> 32:  # Neither written as IPv4.
        assert client_of(address(network ^ 1, host)) != client_of(address(network, host))
