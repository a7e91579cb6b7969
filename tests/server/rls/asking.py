"""Short forms for requests to the rate limit service and for its responses."""

from __future__ import annotations

from typing import Any, NamedTuple

from envoy.service.ratelimit.v3 import rls_pb2

OK, OVER_LIMIT = 1, 2

# No window of these ends while a test runs.
RULES = b"""
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 5}
  - key: tier
    value: gold
    rate_limit: {unit: year, requests_per_unit: 50, name: golden}
  - key: tier
    rate_limit: {unit: year, requests_per_unit: 3}
  - key: tenant
    descriptors:
      - key: op
        rate_limit: {unit: year, requests_per_unit: 4}
  - key: new
    shadow_mode: true
    rate_limit: {unit: year, requests_per_unit: 2}
  - key: vip
    rate_limit:
      unit: year
      requests_per_unit: 100
      replaces: [{name: golden}]
  - key: free
    rate_limit: {unlimited: true}
  - key: blocked
    rate_limit: {unit: year, requests_per_unit: 0}
  - key: path
    detailed_metric: true
    rate_limit: {unit: year, requests_per_unit: 2}
"""

Entries = list[tuple[str, str]]


class Status(NamedTuple):
    code: int
    quota: int | None
    unit: int
    remaining: int
    reset_s: int


class Response(NamedTuple):
    code: int
    statuses: list[Status]
    headers: dict[str, str]


def one(entries: Entries, hits: int | None = None, limit: tuple[int, int] | None = None) -> Any:
    descriptor = rls_pb2.RateLimitRequest().descriptors.add()
    for key, value in entries:
        descriptor.entries.add(key=key, value=value)
    if hits is not None:
        descriptor.hits_addend.value = hits
        descriptor.hits_addend.SetInParent()
    if limit is not None:
        descriptor.limit.requests_per_unit, descriptor.limit.unit = limit
    return descriptor


def request(*descriptors: Any, domain: str = "edge", hits: int = 0) -> Any:
    return rls_pb2.RateLimitRequest(domain=domain, descriptors=descriptors, hits_addend=hits)


def response(published: Any) -> Response:
    return Response(
        published.overall_code,
        [
            Status(
                status.code,
                status.current_limit.requests_per_unit if status.HasField("current_limit") else None,
                status.current_limit.unit,
                status.limit_remaining,
                status.duration_until_reset.seconds,
            )
            for status in published.statuses
        ],
        {header.key: header.value for header in published.response_headers_to_add},
    )


def parsed(data: bytes) -> Response:
    published = rls_pb2.RateLimitResponse()
    published.ParseFromString(data)
    return response(published)
