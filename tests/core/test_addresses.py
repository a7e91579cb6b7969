from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.addresses import address_identifier, parse_address


@given(st.ip_addresses(), st.booleans())
def test_an_address_is_read_back_with_and_without_a_port(address: object, has_port: bool) -> None:
    text = str(address)
    if has_port:
        text = f"[{text}]:443" if ":" in text else f"{text}:443"
    found = parse_address(f' "{text}" ')
    assert found == (getattr(address, "ipv4_mapped", None) or address)


@pytest.mark.parametrize("text", ["", "unknown", "_hidden", "1.2.3", "1.2.3.4.5", "::1]", "host:80"])
def test_what_is_not_an_address_is_none(text: str) -> None:
    assert parse_address(text) is None


def test_a_zone_and_an_ipv4_address_in_ipv6_are_understood() -> None:
    assert parse_address("fe80::1%eth0") == ip_address("fe80::1")
    assert parse_address("::ffff:192.0.2.7") == ip_address("192.0.2.7")


@given(st.ip_addresses(v=6), st.integers(1, 127))
def test_all_addresses_of_an_ipv6_network_have_one_identifier(address: object, prefix: int) -> None:
    network = ip_network((address, prefix), strict=False)  # type: ignore[arg-type]  # typeshed knows no such tuple
    assert {address_identifier(each, prefix) for each in (network[0], network[-1])} == {str(network)}


def test_ipv4_addresses_and_whole_ipv6_addresses_are_their_own_identifiers() -> None:
    assert address_identifier(ip_address("192.0.2.7"), 64) == "192.0.2.7"
    assert address_identifier(ip_address("2001:db8::7"), 128) == "2001:db8::7"
