from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import ConfigurationError, InvalidInput
from tidegate.integrations import Key, Proxies, api_key, header, ip, session, user
from tidegate.integrations.callers import _parse_address, key_of
from tidegate.integrations.wsgi import WsgiIncoming


def incoming(peer: str | None = "203.0.113.7", native: Any = None, **headers: str) -> WsgiIncoming:
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": peer}
    environ |= {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    return WsgiIncoming(environ, native)


def find(key: Key, request: WsgiIncoming, proxies: Proxies | None = None) -> Any:
    return key.find(request, proxies or Proxies())


v4 = st.ip_addresses(v=4).filter(lambda one: not one.is_private)
forged = st.lists(st.one_of(st.ip_addresses().map(str), st.text(max_size=12)), max_size=40).map(", ".join)


@given(forged, st.sampled_from(["x_forwarded_for", "forwarded", "x_real_ip"]))
def test_without_configured_proxies_no_header_is_trusted(said: str, name: str) -> None:
    assert find(ip, incoming(**{name: said})) == "203.0.113.7"


@given(forged, v4, st.integers(1, 4))
def test_behind_trusted_hops_a_forged_x_forwarded_for_changes_nothing(
    said: str, caller: Any, hops: int
) -> None:
    # The first proxy appends the caller, every further one the proxy before it.
    ours = [str(caller)] + [f"10.0.0.{number}" for number in range(1, hops)]
    value = ", ".join([said, *ours] if said else ours)
    request = incoming("10.0.0.99", x_forwarded_for=value)
    assert find(ip, request, Proxies(trusted_hops=hops)) == str(caller)


@given(forged, v4, st.integers(1, 4))
def test_behind_trusted_networks_a_forged_x_forwarded_for_changes_nothing(
    said: str, caller: Any, hops: int
) -> None:
    ours = [str(caller)] + [f"10.0.0.{number}" for number in range(1, hops)]
    value = ", ".join([said, *ours] if said else ours)
    request = incoming("10.0.0.99", x_forwarded_for=value)
    assert find(ip, request, Proxies(trusted_networks=["10.0.0.0/8"])) == str(caller)


@given(forged, v4)
def test_a_caller_who_goes_around_the_proxies_is_counted_by_its_own_address(said: str, caller: Any) -> None:
    request = incoming(str(caller), x_forwarded_for=said)
    assert find(ip, request, Proxies(trusted_networks=["10.0.0.0/8"])) == str(caller)


NODES = st.text(alphabet='for=;", \\abc0123456789.[]:', max_size=60)


@given(NODES, v4)
def test_nothing_in_a_forged_forwarded_header_can_choose_another_caller(said: str, caller: Any) -> None:
    value = f"{said}, for={caller};proto=https" if said else f"for={caller}"
    found = find(ip, incoming("10.0.0.9", forwarded=value), Proxies(trusted_hops=1, header="forwarded"))
    # An open quote makes the header unreadable: then the proxy is counted, never what the client wrote.
    assert found in {str(caller), "10.0.0.9"}


@pytest.mark.parametrize(
    ("value", "caller"),
    [
        ("for=192.0.2.60;proto=http;by=203.0.113.43", "192.0.2.60"),
        ('For="[2001:db8:cafe::17]:4711"', "2001:db8:cafe::/64"),
        ('for=198.51.100.1, for="192.0.2.43:80"', "192.0.2.43"),
        ("for=unknown", "10.0.0.9"),
        ("for=_hidden", "10.0.0.9"),
        ("proto=https", "10.0.0.9"),
        ('for=1.2.3.4;host="', "10.0.0.9"),
        ("", "10.0.0.9"),
    ],
)
def test_the_forwarded_header_is_read_by_its_grammar(value: str, caller: str) -> None:
    request = incoming("10.0.0.9", forwarded=value)
    assert find(ip, request, Proxies(trusted_hops=1, header="forwarded")) == caller


def test_a_host_with_a_comma_cannot_add_a_hop_to_the_forwarded_header() -> None:
    value = 'for=203.0.113.7;host="a,for=1.2.3.4;x=b"'
    request = incoming("10.0.0.9", forwarded=value)
    assert find(ip, request, Proxies(trusted_hops=1, header="forwarded")) == "203.0.113.7"


def test_x_real_ip_is_trusted_from_a_trusted_proxy_only() -> None:
    proxies = Proxies(trusted_networks=["10.0.0.0/8"], header="x-real-ip")
    assert find(ip, incoming("10.0.0.9", x_real_ip="198.51.100.4"), proxies) == "198.51.100.4"
    assert find(ip, incoming("203.0.113.7", x_real_ip="198.51.100.4"), proxies) == "203.0.113.7"


@pytest.mark.parametrize(
    ("entry", "caller"),
    [
        ("198.51.100.4:5000", "198.51.100.4"),
        ("[2001:db8::1]:443", "2001:db8::/64"),
        ("2001:db8:0:1:ffff::9", "2001:db8:0:1::/64"),
        ("::ffff:198.51.100.4", "198.51.100.4"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_addresses_are_understood_with_ports_brackets_and_zones(entry: str, caller: str) -> None:
    assert find(ip, incoming("10.0.0.9", x_forwarded_for=entry), Proxies(trusted_hops=1)) == caller


@given(st.ip_addresses(v=6), st.integers(0, 2**64 - 1))
def test_all_addresses_of_a_64_are_one_caller(address: Any, low: int) -> None:
    neighbour = ipaddress.IPv6Address((int(address) >> 64 << 64) | low)
    if neighbour.ipv4_mapped is None and address.ipv4_mapped is None:
        assert find(ip, incoming(str(address))) == find(ip, incoming(str(neighbour)))


def test_the_length_of_the_ipv6_prefix_can_be_chosen() -> None:
    assert find(ip, incoming("2001:db8:1:2::5"), Proxies(ipv6_prefix=48)) == "2001:db8:1::/48"


def test_a_header_of_thousands_of_trusted_addresses_is_read_to_a_bound() -> None:
    value = ", ".join(["198.51.100.9"] + ["10.0.0.1"] * 50_000)
    request = incoming("10.0.0.9", x_forwarded_for=value)
    assert find(ip, request, Proxies(trusted_networks=["10.0.0.0/8"])) == "10.0.0.1"


def test_what_clients_write_into_headers_is_not_kept_in_memory() -> None:
    _parse_address.cache_clear()
    proxies = Proxies(trusted_hops=1)
    for number in range(100):
        forged = "x" * 60_000 + str(number)
        assert find(ip, incoming("10.0.0.9", x_forwarded_for=forged), proxies) == "10.0.0.9"
    assert _parse_address.cache_info().currsize <= 1


def test_a_unix_socket_has_no_caller_unless_its_proxy_is_trusted() -> None:
    request = incoming(None, x_forwarded_for="198.51.100.4")
    assert find(ip, request) is None
    assert find(ip, request, Proxies(trusted_networks=["10.0.0.0/8"])) is None
    assert find(ip, request, Proxies(trusted_networks=["unix"])) == "198.51.100.4"
    assert find(ip, request, Proxies(trusted_hops=1)) == "198.51.100.4"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"trusted_hops": -1}, "trusted_hops"),
        ({"trusted_hops": True}, "trusted_hops"),
        ({"trusted_hops": 33}, "trusted_hops"),
        ({"trusted_networks": ["10.0.0.1/8"]}, "trusted_networks"),
        ({"trusted_networks": "10.0.0.0/8"}, "trusted_networks"),
        ({"header": "via"}, "header"),
        ({"ipv6_prefix": 129}, "ipv6_prefix"),
    ],
)
def test_wrong_proxies_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        Proxies(**options)


def test_hops_and_networks_together_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="give only one of them"):
        Proxies(trusted_hops=1, trusted_networks=["10.0.0.0/8"])


class Person:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


@pytest.mark.parametrize(
    ("person", "name"),
    [
        (Person(is_authenticated=True, pk=7), "7"),
        (Person(is_authenticated=False, pk=7), None),
        (Person(id="ann"), "ann"),
        (Person(get_id=lambda: "9"), "9"),
        (Person(get_id=lambda: None), None),
        (Person(username="bob"), "bob"),
        (Person(), None),
        ("ann", "ann"),
        (None, None),
    ],
)
def test_the_user_is_found_as_the_frameworks_have_it(person: object, name: str | None) -> None:
    assert find(user, incoming(native=Person(user=person))) == name


def test_secrets_are_counted_by_a_digest() -> None:
    request = incoming(x_api_key="sk_live_secret", cookie='a=b; session="s3cret"; c=d')
    for key in (api_key(), session()):
        found = find(key, request)
        assert len(found) == 32 and "cret" not in found
    assert find(api_key(), incoming()) is None
    assert find(session("other"), request) is None


def test_a_fallback_keeps_users_and_addresses_apart() -> None:
    key = user | ip
    assert find(key, incoming(native=Person(user="203.0.113.7"))) == "user:203.0.113.7"
    assert find(key, incoming(native=Person(user=None))) == "ip:203.0.113.7"
    three = header("x-tenant") | user | ip
    assert find(three, incoming(native=Person(user=None))) == "ip:203.0.113.7"
    assert find(three, incoming(native=Person(user="ann"))) == "user:ann"
    assert find(three, incoming(native=Person(user=None), x_tenant="acme")) == "x-tenant:acme"


def test_a_function_of_the_request_is_a_key_and_anything_else_is_refused() -> None:
    assert find(key_of(lambda native: native["REMOTE_ADDR"]), incoming()) == "203.0.113.7"
    assert find(ip | (lambda _: "other"), incoming(None)) == "<lambda>:other"
    with pytest.raises(InvalidInput, match=r"^by: "):
        key_of("ip")  # type: ignore[arg-type]


async def test_a_fallback_may_be_asynchronous() -> None:
    async def unknown(_: object) -> None:
        return None

    async def person(_: object) -> str:
        return "ann"

    assert await find(unknown | ip, incoming()) == "ip:203.0.113.7"
    assert await find(person | ip, incoming()) == "person:ann"
    assert await find(user | key_of(person), incoming(native=Person(user=None))) == "person:ann"
    assert await find(key_of(unknown) | unknown, incoming()) is None
