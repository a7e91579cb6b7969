"""The messages of Tidegate against the published ones (xds-protos), in both directions."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.service.ratelimit.v3 import rls_pb2
from google.protobuf.message import DecodeError as PublishedDecodeError
from grpc_health.v1 import health_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.server.rls.messages import (
    DESCRIPTORS_MAX,
    ENTRIES_MAX,
    Code,
    ServingStatus,
    current_limit,
    header_to_add,
    parse_health_request,
    parse_request,
    response_start,
    serving_response,
    status,
)
from tidegate.server.rls.protobuf import DecodeError

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def published_requests(draw: st.DrawFn) -> Any:
    request = rls_pb2.RateLimitRequest(domain=draw(text), hits_addend=draw(st.just(0) | uint32))
    for _ in range(draw(st.integers(0, 4))):
        descriptor = request.descriptors.add()
        for _ in range(draw(st.integers(0, 4))):
            descriptor.entries.add(key=draw(text), value=draw(text))
        if draw(st.booleans()):
            descriptor.limit.requests_per_unit = draw(uint32)
            descriptor.limit.unit = draw(st.integers(0, 7))
        if draw(st.booleans()):
            descriptor.hits_addend.value = draw(st.just(0) | uint64)
            descriptor.hits_addend.SetInParent()
    return request


def as_published(request: Any) -> object:
    return (
        request.domain,
        [
            (
                [(entry.key, entry.value) for entry in descriptor.entries],
                (descriptor.limit.requests_per_unit, descriptor.limit.unit)
                if descriptor.HasField("limit")
                else None,
                descriptor.hits_addend.value if descriptor.HasField("hits_addend") else None,
            )
            for descriptor in request.descriptors
        ],
        request.hits_addend,
    )


@given(published_requests())
def test_a_published_request_is_read_correctly(request: Any) -> None:
    assert parse_request(request.SerializeToString()) == as_published(request)


@settings(max_examples=500)
@given(published_requests(), st.data())
def test_damaged_bytes_are_an_error_or_what_the_published_parser_reads(
    request: Any, data: st.DataObject
) -> None:
    damaged = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    check_same(bytes(damaged))


@given(st.binary(max_size=60))
def test_any_bytes_are_an_error_or_what_the_published_parser_reads(data: bytes) -> None:
    check_same(data)


def check_same(data: bytes) -> None:
    try:
        ours: object = parse_request(data)
    except DecodeError:
        ours = None
    published = rls_pb2.RateLimitRequest()
    try:
        published.ParseFromString(data)
        # An enum that does not exist is an int there; a negative one the same 32 bits.
        theirs: Any = as_published(published)
    except (PublishedDecodeError, UnicodeDecodeError):
        theirs = None
    if theirs is not None and ours is not None:
        theirs = (
            theirs[0],
            [
                (e, None if limit is None else (limit[0], limit[1] & 0xFFFFFFFF), h)
                for e, limit, h in theirs[1]
            ],
            theirs[2],
        )
    assert ours == theirs, data


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Code)), uint32, st.integers(1, 7), text, uint32, uint32), max_size=5
    )
)
def test_the_published_parser_reads_the_same_response(
    items: list[tuple[Code, int, int, str, int, int]],
) -> None:
    data = response_start(Code.OVER_LIMIT)
    for code, requests, unit, name, remaining, reset_s in items:
        data += status(code, current_limit(requests, unit, name), remaining, reset_s)
    data += header_to_add("ratelimit", "x" * 300) + header_to_add("retry-after", "1")
    response = rls_pb2.RateLimitResponse()
    response.ParseFromString(data)
    assert response.overall_code == Code.OVER_LIMIT
    assert [(h.key, h.value) for h in response.response_headers_to_add] == [
        ("ratelimit", "x" * 300),
        ("retry-after", "1"),
    ]
    assert [
        (
            one.code,
            one.current_limit.requests_per_unit,
            one.current_limit.unit,
            one.current_limit.name,
            one.limit_remaining,
            one.duration_until_reset.seconds,
        )
        for one in response.statuses
    ] == items


def test_descriptors_and_entries_are_bounded() -> None:
    request = rls_pb2.RateLimitRequest(domain="d")
    for _ in range(DESCRIPTORS_MAX):
        request.descriptors.add()
    parse_request(request.SerializeToString())
    request.descriptors.add()
    with pytest.raises(DecodeError, match="descriptors"):
        parse_request(request.SerializeToString())
    request = rls_pb2.RateLimitRequest(domain="d")
    descriptor = request.descriptors.add()
    for _ in range(ENTRIES_MAX + 1):
        descriptor.entries.add(key="k", value="v")
    with pytest.raises(DecodeError, match="entries"):
        parse_request(request.SerializeToString())


def test_groups_in_unknown_fields_are_skipped_but_not_without_end() -> None:
    group = b"\xa3\x06" + b"\x0a\x01x" + b"\xa4\x06"
    assert parse_request(b"\x0a\x01d" + group).domain == "d"
    with pytest.raises(DecodeError):
        parse_request(b"\xa3\x06" * 1000 + b"\xa4\x06" * 1000)
    with pytest.raises(DecodeError):
        parse_request(b"\xa3\x06\xac\x06")


@given(text)
def test_health_messages_are_the_published_ones(service: str) -> None:
    data = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    assert parse_health_request(data) == service
    for serving in ServingStatus:
        response = health_pb2.HealthCheckResponse()
        response.ParseFromString(serving_response(serving))
        assert response.status == serving
