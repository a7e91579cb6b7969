"""httpx: transports that keep a client within a quota.

    client = httpx.Client(transport=RateLimitTransport("10/second; 1000/hour"))
    client = httpx.AsyncClient(transport=AsyncRateLimitTransport("10/second", timeout=0))

Requests wait until they fit, at most `timeout` seconds; then `LimitExceeded` is raised, and nothing was sent or
counted. By default each host has a quota of its own.
"""

from __future__ import annotations

from typing import Any

import httpx

from tidegate.integrations.outgoing import AsyncOutgoing, Outgoing
from tidegate.integrations.rules import LimitsLike

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport"]


class RateLimitTransport(httpx.BaseTransport):
    """Options: `by`, `cost`, `namespace`, `timeout`, `limiter`; `transport` sends, an `HTTPTransport` by default."""

    def __init__(
        self, limits: LimitsLike, *, transport: httpx.BaseTransport | None = None, **options: Any
    ) -> None:
        self._outgoing = Outgoing(limits, **options)
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._outgoing.admit(request)
        return self._transport.handle_request(request)

    def close(self) -> None:
        self._transport.close()


class AsyncRateLimitTransport(httpx.AsyncBaseTransport):
    """The same for `httpx.AsyncClient`."""

    def __init__(
        self, limits: LimitsLike, *, transport: httpx.AsyncBaseTransport | None = None, **options: Any
    ) -> None:
        self._outgoing = AsyncOutgoing(limits, **options)
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._outgoing.admit(request)
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        await self._transport.aclose()
