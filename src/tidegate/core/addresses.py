"""Addresses of callers: as proxies and gateways write them, and as identifiers of counters.

An IPv6 address counts as its network, because one subscriber has all of a /64; an IPv4 address that is mapped into IPv6
counts as itself.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

__all__ = ["Address", "address_identifier", "parse_address"]

Address = IPv4Address | IPv6Address


def parse_address(text: str) -> Address | None:
    """The address in `1.2.3.4`, `1.2.3.4:80`, `2001:db8::1`, `[2001:db8::1]:80`; None if there is none."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def address_identifier(address: Address, ipv6_prefix: int) -> str:
    """The identifier under which a caller from this address is counted."""
    if isinstance(address, IPv4Address) or ipv6_prefix == 128:
        return str(address)
    return str(ip_network((address, ipv6_prefix), strict=False))
