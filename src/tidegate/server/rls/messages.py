"""The messages of `envoy.service.ratelimit.v3` and `grpc.health.v1`, with the field numbers as published.

Written by hand, because a package of all of Envoy's messages would put a top-level `envoy` into site-packages. The
tests compare with that package: what is encoded by one is decoded by the other, for any bytes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from tidegate.server.rls.protobuf import (
    DecodeError,
    length_delimited,
    read_tag,
    read_varint,
    skip_field,
    varint,
)

UINT32_MAX: Final = 0xFFFF_FFFF
# As many as the HTTP API takes in one call; proxies send one to five.
DESCRIPTORS_MAX: Final = 100
ENTRIES_MAX: Final = 32


class Code(IntEnum):
    """RateLimitResponse.Code."""

    UNKNOWN = 0
    OK = 1
    OVER_LIMIT = 2


class ServingStatus(IntEnum):
    """HealthCheckResponse.ServingStatus."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2


class InlineLimit(NamedTuple):
    """RateLimitDescriptor.RateLimitOverride: a limit that the request brings itself."""

    requests_per_unit: int
    unit: int


class Descriptor(NamedTuple):
    """RateLimitDescriptor."""

    entries: list[tuple[str, str]]
    limit: InlineLimit | None
    hits_addend: int | None
    """None: the request's own counts. 0: check without consuming."""


class RateLimitRequest(NamedTuple):
    """What is asked."""

    domain: str
    descriptors: list[Descriptor]
    hits_addend: int
    """0 when it was not set, which means 1."""


def _length(data: bytes, position: int, end: int) -> tuple[int, int]:
    """(where a length-delimited field begins, where it ends)."""
    if position < end and data[position] < 0x80:
        length = data[position]
        position += 1
    else:
        length, position = read_varint(data, position, end)
    if length > end - position:
        raise DecodeError("a field is cut off")
    return position, position + length


def parse_request(data: bytes) -> RateLimitRequest:
    """RateLimitRequest: domain = 1, descriptors = 2, hits_addend = 3."""
    domain = ""
    descriptors: list[Descriptor] = []
    hits_addend = 0
    position, end = 0, len(data)
    while position < end:
        tag = data[position]
        if tag == 0x12:
            start, position = _length(data, position + 1, end)
            if len(descriptors) >= DESCRIPTORS_MAX:
                raise DecodeError(f"more than {DESCRIPTORS_MAX} descriptors")
            descriptors.append(_descriptor(data, start, position))
        elif tag == 0x0A:
            start, position = _length(data, position + 1, end)
            domain = _text(data, start, position)
        elif tag == 0x18:
            hits_addend, position = read_varint(data, position + 1, end)
            hits_addend &= UINT32_MAX
        else:
            tag, position = read_tag(data, position, end)
            position = skip_field(data, tag, position, end)
    return RateLimitRequest(domain, descriptors, hits_addend)


def _descriptor(data: bytes, position: int, end: int) -> Descriptor:
    """RateLimitDescriptor: entries = 1, limit = 2, hits_addend = 3."""
    entries: list[tuple[str, str]] = []
    limit: InlineLimit | None = None
    hits_addend: int | None = None
    while position < end:
        tag = data[position]
        if tag == 0x0A:
            start, position = _length(data, position + 1, end)
            if len(entries) >= ENTRIES_MAX:
                raise DecodeError(f"more than {ENTRIES_MAX} entries in a descriptor")
            entries.append(_entry(data, start, position))
        elif tag == 0x12:
            start, position = _length(data, position + 1, end)
            limit = _inline_limit(data, start, position, limit or InlineLimit(0, 0))
        elif tag == 0x1A:
            start, position = _length(data, position + 1, end)
            hits_addend = _uint64_value(data, start, position, hits_addend or 0)
        else:
            tag, position = read_tag(data, position, end)
            position = skip_field(data, tag, position, end)
    return Descriptor(entries, limit, hits_addend)


def _entry(data: bytes, position: int, end: int) -> tuple[str, str]:
    """RateLimitDescriptor.Entry: key = 1, value = 2."""
    key = value = ""
    while position < end:
        tag = data[position]
        if tag == 0x0A:
            start, position = _length(data, position + 1, end)
            key = _text(data, start, position)
        elif tag == 0x12:
            start, position = _length(data, position + 1, end)
            value = _text(data, start, position)
        else:
            tag, position = read_tag(data, position, end)
            position = skip_field(data, tag, position, end)
    return key, value


def _inline_limit(data: bytes, position: int, end: int, before: InlineLimit) -> InlineLimit:
    """RateLimitOverride: requests_per_unit = 1, unit = 2. A field that comes twice is merged, as protobuf asks."""
    requests_per_unit, unit = before
    while position < end:
        tag, position = read_tag(data, position, end)
        if tag == 0x08:
            requests_per_unit, position = read_varint(data, position, end)
            requests_per_unit &= UINT32_MAX
        elif tag == 0x10:
            unit, position = read_varint(data, position, end)
            unit &= UINT32_MAX
        else:
            position = skip_field(data, tag, position, end)
    return InlineLimit(requests_per_unit, unit)


def _uint64_value(data: bytes, position: int, end: int, value: int) -> int:
    """google.protobuf.UInt64Value: value = 1. An empty message is an explicit 0."""
    while position < end:
        tag, position = read_tag(data, position, end)
        if tag == 0x08:
            value, position = read_varint(data, position, end)
        else:
            position = skip_field(data, tag, position, end)
    return value


def _text(data: bytes, start: int, end: int) -> str:
    try:
        return data[start:end].decode()
    except UnicodeDecodeError as error:
        raise DecodeError("a string that is not UTF-8") from error


# Answers: RateLimitResponse is overall_code = 1, statuses = 2, response_headers_to_add = 3.

_STARTS: Final = {code: b"\x08" + varint(code) for code in Code}


def response_start(code: Code) -> bytes:
    """The overall code. Statuses and headers are appended to it."""
    return _STARTS[code]


def current_limit(requests_per_unit: int, unit: int, name: str) -> bytes:
    """DescriptorStatus.current_limit, whole: RateLimit is requests_per_unit = 1, unit = 2, name = 3."""
    message = b""
    if requests_per_unit:
        message += b"\x08" + varint(requests_per_unit)
    message += b"\x10" + varint(unit)
    if name:
        message += length_delimited(0x1A, name.encode())
    return length_delimited(0x12, message)


def status(code: Code, limit: bytes, remaining: int, reset_s: int) -> bytes:
    """A status in full: code = 1, current_limit = 2, limit_remaining = 3, duration_until_reset = 4 (seconds = 1)."""
    message = _STARTS[code] + limit
    if remaining:
        message += b"\x18" + varint(min(remaining, UINT32_MAX))
    if reset_s:
        seconds = varint(reset_s)
        message = b"%b\x22%c\x08%b" % (message, len(seconds) + 1, seconds)
    return b"\x12%b%b" % (varint(len(message)), message)


def header_to_add(name: str, value: str) -> bytes:
    """One of response_headers_to_add: HeaderValue is key = 1, value = 2."""
    return length_delimited(
        0x1A, length_delimited(0x0A, name.encode()) + length_delimited(0x12, value.encode("ascii"))
    )


def parse_health_request(data: bytes) -> str:
    """HealthCheckRequest: service = 1."""
    service = ""
    position, end = 0, len(data)
    while position < end:
        tag, position = read_tag(data, position, end)
        if tag == 0x0A:
            start, position = _length(data, position, end)
            service = _text(data, start, position)
        else:
            position = skip_field(data, tag, position, end)
    return service


def serving_response(serving: ServingStatus) -> bytes:
    """HealthCheckResponse: status = 1."""
    return b"\x08" + varint(serving) if serving else b""
