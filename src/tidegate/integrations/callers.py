"""Who the caller is: keys by address, user, API key or session, and which proxies are trusted.

Rules: by default no header is trusted, because every client can send X-Forwarded-For. With proxies configured, a
header is read from the right, where the trusted proxies wrote, and never further than they reach. IPv6 callers count
by their /64, because one subscriber has all of it. Secrets (API keys, session ids) are counted by a digest.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Literal

from tidegate.core.addresses import Address, address_identifier, parse_address
from tidegate.core.model import NAME_LENGTH_MAX, checked_int
from tidegate.errors import ConfigurationError, InvalidInput
from tidegate.integrations.incoming import Incoming

__all__ = ["Key", "Proxies", "api_key", "header", "ip", "key_of", "session", "user"]

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
ForwardingHeader = Literal["x-forwarded-for", "forwarded", "x-real-ip"]

# A client may send a header of any length, full of addresses that look like ours: what is behind this is not read.
HOPS_MAX: Final = 32
FORWARDED_LENGTH_MAX: Final = 8_192
# IPv6 in full with a zone, brackets, a port and quotes, and some spaces.
ADDRESS_LENGTH_MAX: Final = 100

UNIX: Final = "unix"


def _parse(text: str) -> Address | None:
    # What is longer is not an address, and must not be remembered: clients write these headers.
    return _parse_address(text) if len(text) <= ADDRESS_LENGTH_MAX else None


_parse_address = lru_cache(maxsize=8192)(parse_address)


def _forwarded_for(value: str) -> list[str]:
    """The `for=` of every element of a Forwarded header (RFC 7239), in order; "" where an element has none.

    A header with an open quote is ignored: a client could use it to hide what the proxies appended.
    """
    found: list[str] = []
    for element in _split_unquoted(value, ","):
        node = ""
        for pair in _split_unquoted(element, ";"):
            name, _, text = pair.strip().partition("=")
            if name.strip().lower() == "for":
                node = text.strip()
        found.append(node)
    return found


def _split_unquoted(text: str, separator: str) -> list[str]:
    parts: list[str] = []
    quoted = escaped = False
    begin = 0
    for place, character in enumerate(text):
        if escaped:
            escaped = False
        elif quoted and character == "\\":
            escaped = True
        elif character == '"':
            quoted = not quoted
        elif character == separator and not quoted:
            parts.append(text[begin:place])
            begin = place + 1
    parts.append(text[begin:])
    return [] if quoted else parts


class Proxies:
    """The proxies in front of the application: how many, or in which networks.

    `Proxies(trusted_hops=1)` for one reverse proxy that every request passes, and
    `Proxies(trusted_networks=["10.0.0.0/8"])` where requests may also come directly. A server that listens on a Unix
    socket is reached from the network "unix".
    """

    __slots__ = ("are_trusted", "header", "hops", "ipv6_prefix", "networks", "unix")

    def __init__(
        self,
        *,
        trusted_hops: int = 0,
        trusted_networks: Sequence[str] = (),
        header: ForwardingHeader = "x-forwarded-for",
        ipv6_prefix: int = 64,
    ) -> None:
        if checked_int("trusted_hops", trusted_hops, 0) > HOPS_MAX:
            raise InvalidInput("trusted_hops", trusted_hops, f"at most {HOPS_MAX}")
        if isinstance(trusted_networks, str):
            raise InvalidInput("trusted_networks", trusted_networks, 'a list, such as ["10.0.0.0/8"]')
        if trusted_hops and trusted_networks:
            raise ConfigurationError(
                "proxies: trusted_hops and trusted_networks are alternatives: give only one of them"
            )
        if header not in ("x-forwarded-for", "forwarded", "x-real-ip"):
            raise InvalidInput("header", header, '"x-forwarded-for", "forwarded" or "x-real-ip"')
        if checked_int("ipv6_prefix", ipv6_prefix, 1) > 128:
            raise InvalidInput("ipv6_prefix", ipv6_prefix, "1 to 128")
        self.hops = trusted_hops
        self.unix = UNIX in trusted_networks
        self.networks: tuple[Network, ...] = tuple(
            _network(text) for text in trusted_networks if text != UNIX
        )
        self.are_trusted = bool(trusted_hops or trusted_networks)
        self.header = header
        self.ipv6_prefix = ipv6_prefix

    def behind(self, incoming: Incoming) -> str | None:
        """The caller's address as an identifier; None if the connection has no address and no proxy is trusted."""
        address = self._behind_proxies(incoming)
        return None if address is None else _identifier(address, self.ipv6_prefix)

    def _behind_proxies(self, incoming: Incoming) -> Address | None:
        peer = None if incoming.peer is None else _parse(incoming.peer)
        found = peer
        is_unix = incoming.peer is None or incoming.peer == ""
        if self.hops:
            for distance, entry in enumerate(self._entries(incoming), 1):
                address = _parse(entry)
                if address is None:
                    break
                found = address
                if distance == self.hops:
                    break
            return found
        if is_unix:
            if not self.unix:
                return None
        elif peer is None or not self._trusts(peer):
            return peer
        for entry in self._entries(incoming):
            address = _parse(entry)
            if address is None:
                break
            found = address
            if not self._trusts(address):
                break
        return found

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self.networks if network.version == address.version)

    def _entries(self, incoming: Incoming) -> list[str]:
        """What the header says, the nearest hop first, never more than the bound."""
        value = incoming.header(self.header)
        if not value:
            return []
        if self.header == "x-real-ip":
            return [value]
        if self.header == "x-forwarded-for":
            # The rightmost entries are those of our proxies.
            return value.rsplit(",", HOPS_MAX)[: -HOPS_MAX - 1 : -1]
        if len(value) > FORWARDED_LENGTH_MAX:
            return []
        return _forwarded_for(value)[: -HOPS_MAX - 1 : -1]


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise InvalidInput(
            "trusted_networks", text, f'networks such as "10.0.0.0/8", or "unix" ({error})'
        ) from error


_identifier = lru_cache(maxsize=8192)(address_identifier)


@lru_cache(maxsize=8192)
def _direct_caller(peer: str, ipv6_prefix: int) -> str:
    address = _parse(peer)
    # Not every framework's test client has an address for a peer.
    return peer if address is None else _identifier(address, ipv6_prefix)


KeyFunction = Callable[[Any], Any]


class Key:
    """A way to name the caller. `first | second` uses the second where the first finds nothing."""

    __slots__ = ("find", "name", "parts")

    def __init__(
        self, name: str, find: Callable[[Incoming, Proxies], Any], parts: tuple[Key, ...] = ()
    ) -> None:
        self.name = name
        # May return an awaitable where the framework is asynchronous.
        self.find = find
        self.parts = parts or (self,)

    def __or__(self, other: Key | KeyFunction) -> Key:
        return _first_of((*self.parts, *key_of(other).parts))

    def __ror__(self, other: KeyFunction) -> Key:
        return _first_of((*key_of(other).parts, *self.parts))

    def __repr__(self) -> str:
        return f"<key {self.name}>"


def _first_of(parts: tuple[Key, ...]) -> Key:
    def find(incoming: Incoming, proxies: Proxies) -> Any:
        for place, part in enumerate(parts):
            value = part.find(incoming, proxies)
            if hasattr(value, "__await__"):
                return find_later(value, place, incoming, proxies)
            if value:
                # Prefixed, so that a user who is called 203.0.113.7 is not that address.
                return f"{part.name}:{value}"
        return None

    async def find_later(value: Any, place: int, incoming: Incoming, proxies: Proxies) -> str | None:
        for part in parts[place:]:
            if value is None:
                value = part.find(incoming, proxies)
            found = await value if hasattr(value, "__await__") else value
            if found:
                return f"{part.name}:{found}"
            value = None
        return None

    return Key("|".join(part.name for part in parts), find, parts)


def key_of(by: Key | KeyFunction) -> Key:
    """A function of the framework's request as a key."""
    if isinstance(by, Key):
        return by
    if not callable(by):
        raise InvalidInput(
            "by", by, "a key such as ip or user, or a function of the request that returns a str"
        )
    return Key(getattr(by, "__name__", "key"), lambda incoming, _: by(incoming.native))


def digest(secret: str) -> str:
    """A secret as an identifier: what counts it must not be able to use it."""
    return blake2b(secret.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def bounded(identifier: str) -> str:
    """An identifier of any length as one of an allowed length."""
    return identifier if len(identifier) <= NAME_LENGTH_MAX else digest(identifier)


def _user_of(incoming: Incoming, _proxies: Proxies) -> Any:
    found: Any = incoming.user()
    return _user_later(found) if hasattr(found, "__await__") else user_name(found)


async def _user_later(found: Any) -> str | None:
    return user_name(await found)


def user_name(found: Any) -> str | None:
    """The identifier of a framework's user; None for an anonymous one."""
    if found is None or getattr(found, "is_authenticated", True) is False:
        return None
    if isinstance(found, (str, int)):
        return str(found)
    get_id = getattr(found, "get_id", None)  # Flask-Login
    if callable(get_id):
        name = get_id()
        return None if name is None else str(name)
    for field in ("pk", "id", "identity", "username"):
        try:
            name = getattr(found, field, None)
        except NotImplementedError:  # Starlette's SimpleUser has no identity
            name = None
        if name is not None:
            return str(name)
    return None


def header(name: str) -> Key:
    """The value of a header that a trusted gateway sets, such as `header("x-tenant")`."""
    wanted = name.lower()

    def find(incoming: Incoming, _proxies: Proxies) -> str | None:
        value = incoming.header(wanted)
        return None if value is None else bounded(value.strip())

    return Key(wanted, find)


def api_key(name: str = "x-api-key") -> Key:
    """The API key in a header, counted by its digest.

    Verify keys before they are limited, or limit by `ip` as well: a client can invent a new key for every request.
    """
    wanted = name.lower()

    def find(incoming: Incoming, _proxies: Proxies) -> str | None:
        value = incoming.header(wanted)
        return digest(value) if value else None

    return Key("api_key", find)


def session(cookie: str = "session") -> Key:
    """The session cookie, counted by its digest. The warning of `api_key` holds for it too."""

    def find(incoming: Incoming, _proxies: Proxies) -> str | None:
        value = incoming.cookie(cookie)
        return digest(value) if value else None

    return Key("session", find)


def _address_of(incoming: Incoming, proxies: Proxies) -> str | None:
    if proxies.are_trusted:
        return proxies.behind(incoming)
    peer = incoming.peer
    return _direct_caller(peer, proxies.ipv6_prefix) if peer else None


ip: Final = Key("ip", _address_of)
"""The caller's address, behind the configured proxies only; IPv6 by /64."""

user: Final = Key("user", _user_of)
"""The authenticated user of the framework: its `pk`, `id`, `identity` or `username`."""
