"""The yes/no check for gateways that understand 200 or 429: nginx, HAProxy, Caddy, Traefik, Envoy's ext_authz.

From the values of an HTTP request to what is asked of the rules, and from the outcome to status and header fields. What
is asked comes from the query (`domain` and one or more `descriptor`) or from a named policy, which takes values from
headers, from the query and from the client's address. All descriptors of a request are decided together.

Functions of their arguments: nothing here reads, waits or decides. The values of a request are not trusted; where they
come from is: the check belongs on a listener that only gateways can reach, or behind a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from tidegate.core.addresses import address_identifier, parse_address
from tidegate.errors import ConfigurationError
from tidegate.server.rls.messages import DESCRIPTORS_MAX, ENTRIES_MAX, UINT32_MAX, Descriptor
from tidegate.server.rls.service import Outcome

# Parameters of a query: a domain, a policy, a cost and the descriptors.
QUERY_FIELDS_MAX: Final = DESCRIPTORS_MAX + 16
# A longer value cannot be a name; its counter would be a digest anyway.
VALUE_CHARS_MAX: Final = 4_096
# Entries of X-Forwarded-For that are looked at, from the right.
HOPS_MAX: Final = 32
SOURCES: Final = "address, authorization, header:NAME, query:NAME or text:VALUE"


class CheckRequest(NamedTuple):
    """What an HTTP request says."""

    query: str
    """After the `?`, as it was sent."""
    headers: Mapping[str, str]
    """By name in lower case; several fields of one name joined with a comma."""
    peer: str
    """The address of the other end of the connection."""


class Source(NamedTuple):
    """Where the value of an entry comes from: `header:x-user` is Source("header", "x-user")."""

    kind: str
    name: str


@dataclass(frozen=True)
class Policy:
    """A named policy: what to ask of the rules, and how to answer a denial."""

    domain: str
    descriptors: tuple[tuple[tuple[str, Source], ...], ...]
    """Entries (key, source) of each descriptor. One whose values are not all there is left out, as Envoy does."""
    deny_status: int = 429


@dataclass(frozen=True)
class CheckConfig:
    """How requests are understood."""

    policies: Mapping[str, Policy] = field(default_factory=dict)
    trusted_hops: int = 0
    """Proxies in front of us whose X-Forwarded-For is trusted. 0: the client is the other end of the connection."""
    ipv6_prefix: int = 64
    """Addresses of one such network are one client: a household or a server usually has a whole /64."""
    hash_key: bytes = b""
    """Keys the digest of Authorization, so that weak passwords cannot be found by trying them."""
    deny_status: int = 429
    """For checks without a policy."""


class CheckQuestion(NamedTuple):
    """What is asked of the rules."""

    domain: str
    descriptors: list[Descriptor]
    cost: int
    deny_status: int


class CheckAnswer(NamedTuple):
    """What is answered."""

    status: int
    headers: dict[str, str]
    body: bytes


class BadCheck(Exception):
    """The check cannot be parsed. The message names the parameter, the value and what would be right."""


# What is asked.


def ask_check(request: CheckRequest, config: CheckConfig) -> CheckQuestion:
    """What a request asks. Raises `BadCheck`."""
    try:
        pairs = parse_qsl(
            request.query, keep_blank_values=True, errors="strict", max_num_fields=QUERY_FIELDS_MAX
        )
    except ValueError as error:
        raise BadCheck(f"query: {error}") from error
    query = _Query(pairs)
    cost = _cost(query.one("cost"))
    name = query.one("policy")
    if name is not None:
        policy = config.policies.get(name)
        if policy is None:
            raise BadCheck(
                f"policy: got {_shown(name)}, expected one of {', '.join(config.policies) or 'none'}"
            )
        if query.one("domain") is not None or query.all("descriptor"):
            raise BadCheck("policy: cannot be combined with domain or descriptor")
        descriptors = _from_policy(policy, request, query, config)
        return CheckQuestion(policy.domain, descriptors, cost, policy.deny_status)
    domain = query.one("domain")
    if not domain:
        raise BadCheck("domain: is missing; give policy, or domain and descriptor")
    texts = query.all("descriptor")
    if not 0 < len(texts) <= DESCRIPTORS_MAX:
        raise BadCheck(
            f"descriptor: got {len(texts)}, expected 1 to {DESCRIPTORS_MAX}, such as descriptor=user=ann"
        )
    return CheckQuestion(domain, [_descriptor(text) for text in texts], cost, config.deny_status)


class _Query:
    """The parameters of a query. Those that are ours are there once, or may repeat."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            if len(value) > VALUE_CHARS_MAX:
                raise BadCheck(f"{_shown(name)}: longer than {VALUE_CHARS_MAX} characters")
            self._values.setdefault(name, []).append(value)

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def one(self, name: str) -> str | None:
        values = self.all(name)
        if len(values) > 1:
            raise BadCheck(f"{name}: given {len(values)} times, expected once")
        return values[0] if values else None


def _cost(text: str | None) -> int:
    if text is None:
        return 1
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > UINT32_MAX:
        raise BadCheck(f"cost: got {_shown(text)}, expected a number from 0 to {UINT32_MAX}")
    return int(text)


def _descriptor(text: str) -> Descriptor:
    """`user=ann`, or with several entries `tenant=acme&op=write`, which is percent-encoded once more in a query."""
    try:
        entries = parse_qsl(
            text, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=ENTRIES_MAX
        )
    except ValueError as error:
        raise BadCheck(f"descriptor: got {_shown(text)}, expected KEY=VALUE: {error}") from error
    if not all(key for key, _ in entries):
        raise BadCheck(f"descriptor: got {_shown(text)}, expected a key before each =")
    return Descriptor(entries, None, None)


def _from_policy(
    policy: Policy, request: CheckRequest, query: _Query, config: CheckConfig
) -> list[Descriptor]:
    descriptors: list[Descriptor] = []
    for entries in policy.descriptors:
        values: list[tuple[str, str]] = []
        for key, source in entries:
            value = _value(source, request, query, config)
            if not value:
                break
            values.append((key, value))
        else:
            descriptors.append(Descriptor(values, None, None))
    return descriptors


def _value(source: Source, request: CheckRequest, query: _Query, config: CheckConfig) -> str:
    """The value, "" if there is none."""
    kind, name = source
    if kind == "address":
        return client_address(request, config)
    if kind == "text":
        return name
    if kind == "query":
        return query.one(name) or ""
    value = request.headers.get("authorization" if kind == "authorization" else name, "").strip()
    if kind == "authorization" and value:
        # A secret must not become part of a counter's name: those are stored, logged and shown.
        return blake2b(
            value.encode("utf-8", "surrogatepass"), digest_size=16, key=config.hash_key
        ).hexdigest()
    if len(value) > VALUE_CHARS_MAX:
        raise BadCheck(f"header {name}: longer than {VALUE_CHARS_MAX} characters")
    return value


def client_address(request: CheckRequest, config: CheckConfig) -> str:
    """The client's address, as far as it is known from proxies that are trusted.

    Each proxy appends the address it was called from. With one trusted hop, the last entry is what our own gateway
    saw; everything left of the trusted entries may have been written by the client itself.
    """
    address = request.peer
    if config.trusted_hops:
        forwarded = request.headers.get("x-forwarded-for", "")
        # Only as many from the right as are trusted: the rest may be long, and the client may have written it.
        entries = [
            entry.strip() for entry in forwarded.rsplit(",", config.trusted_hops)[-config.trusted_hops :]
        ]
        entries = [entry for entry in entries if entry]
        if entries:
            address = entries[0]
    parsed = parse_address(address)
    if parsed is None:
        raise BadCheck(f"address: got {_shown(address)}, expected an IP address")
    return address_identifier(parsed, config.ipv6_prefix)


# Answers.


def answer_check(question: CheckQuestion, outcome: Outcome) -> CheckAnswer:
    """200 or the status for "no", the RateLimit fields, and no body. Nothing of it may be cached."""
    headers = {**outcome.headers(), "Cache-Control": "no-store"}
    return CheckAnswer(200 if outcome.is_allowed else question.deny_status, headers, b"")


def bad_check(error: BadCheck) -> CheckAnswer:
    """A gateway treats anything but 2xx as a denial or an error: the text is for logs and readers."""
    headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}
    return CheckAnswer(400, headers, f"{error}\n".encode())


# Configuration.


def parse_check_config(document: Mapping[str, Any]) -> CheckConfig:
    """The configuration as it stands in a file. Raises `ConfigurationError`, which names the field and the value."""
    known = {"trusted_hops", "ipv6_prefix", "deny_status", "hash_key", "policies"}
    _refuse_unknown(document, known, "check")
    policies = document.get("policies", {})
    if not isinstance(policies, Mapping):
        raise ConfigurationError(f"check.policies: got {_shown(policies)}, expected a table of policies")
    deny_status = _status(document.get("deny_status", 429), "check.deny_status")
    hash_key = document.get("hash_key", "")
    if not isinstance(hash_key, str) or len(hash_key.encode()) > 64:
        raise ConfigurationError("check.hash_key: expected a text of at most 64 bytes")
    return CheckConfig(
        policies={name: _policy(name, value, deny_status) for name, value in policies.items()},
        trusted_hops=_integer(document.get("trusted_hops", 0), 0, HOPS_MAX, "check.trusted_hops"),
        ipv6_prefix=_integer(document.get("ipv6_prefix", 64), 1, 128, "check.ipv6_prefix"),
        hash_key=hash_key.encode(),
        deny_status=deny_status,
    )


def _policy(name: str, document: object, deny_status: int) -> Policy:
    place = f"check.policies.{name}"
    if not isinstance(document, Mapping):
        raise ConfigurationError(f"{place}: got {_shown(document)}, expected domain and descriptors")
    _refuse_unknown(document, {"domain", "descriptors", "deny_status"}, place)
    domain, descriptors = document.get("domain"), document.get("descriptors")
    if not isinstance(domain, str) or not domain:
        raise ConfigurationError(f"{place}.domain: got {_shown(domain)}, expected a domain of the rules")
    if not isinstance(descriptors, Sequence) or not 0 < len(descriptors) <= DESCRIPTORS_MAX:
        raise ConfigurationError(f"{place}.descriptors: expected a list of 1 to {DESCRIPTORS_MAX} tables")
    parsed = [_entries(one, f"{place}.descriptors[{index}]") for index, one in enumerate(descriptors)]
    status = _status(document.get("deny_status", deny_status), f"{place}.deny_status")
    return Policy(domain, tuple(parsed), status)


def _entries(document: object, place: str) -> tuple[tuple[str, Source], ...]:
    if not isinstance(document, Mapping) or not 0 < len(document) <= ENTRIES_MAX:
        raise ConfigurationError(
            f'{place}: got {_shown(document)}, expected a table such as {{user = "header:x-user"}}'
        )
    return tuple([(key, _source(value, f"{place}.{key}")) for key, value in document.items()])


def _source(text: object, place: str) -> Source:
    kind, colon, name = text.partition(":") if isinstance(text, str) else ("", "", "")
    is_named = kind in {"header", "query", "text"} and bool(name)
    if not is_named and not (kind in {"address", "authorization"} and not colon):
        raise ConfigurationError(f"{place}: got {_shown(text)}, expected {SOURCES}")
    return Source(kind, name.lower() if kind == "header" else name)


def _integer(value: object, low: int, high: int, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(f"{place}: got {_shown(value)}, expected a number from {low} to {high}")
    return value


def _status(value: object, place: str) -> int:
    """Gateways take 2xx for yes: a "no" must be a client error, and one that has a name."""
    status = _integer(value, 400, 499, place)
    if status not in {each.value for each in HTTPStatus}:
        raise ConfigurationError(f"{place}: got {status}, expected a status of HTTP, such as 429 or 403")
    return status


def _refuse_unknown(document: Mapping[str, Any], known: set[str], place: str) -> None:
    for key in document:
        if key not in known:
            raise ConfigurationError(
                f"{place}: unknown key {_shown(key)}, expected {', '.join(sorted(known))}"
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
