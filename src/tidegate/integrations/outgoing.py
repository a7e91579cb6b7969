"""Keeps within the limit of a service that is called: requests wait until they fit, or raise.

The clients (`tidegate.integrations.httpx`, `.requests`) hand each request to `Outgoing` or `AsyncOutgoing` before they
send it. Several quotas are one batch, taken when all of them have room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Any, Final
from urllib.parse import urlsplit

from tidegate.core.model import Decision, Request
from tidegate.errors import InvalidInput, LimitExceeded
from tidegate.integrations.answers import closest, describe
from tidegate.integrations.rules import LimitsLike, Rule
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.limiter import Limiter
from tidegate.runtime.waiting import checked_timeout, pause_s

__all__ = ["AsyncOutgoing", "Outgoing"]

NAMESPACE: Final = "http.client"


def host(request: Any) -> str:
    """The host that a request goes to: quotas are usually per service."""
    return urlsplit(str(request.url)).hostname or ""


class _Quota:
    """What all requests of a client share."""

    def __init__(
        self,
        limits: LimitsLike,
        *,
        by: Callable[[Any], str] = host,
        cost: int | Callable[[Any], int] = 1,
        namespace: str = NAMESPACE,
        timeout: float | None = None,
    ) -> None:
        checked_timeout(timeout)
        self._limits = Rule(limits, namespace=namespace).limits_for(limits, None)
        self._by = by
        self._cost = cost
        # Longest wait in seconds: None for as long as it takes, 0 to raise at once.
        self._timeout = timeout

    def batch(self, request: Any) -> list[Request]:
        identifier: object = self._by(request)
        if not isinstance(identifier, str) or not identifier:
            raise InvalidInput(
                "by", identifier, "a function of the request that returns a str that is not empty"
            )
        cost = self._cost(request) if callable(self._cost) else self._cost
        return [Request(limit, identifier, cost) for limit in self._limits]

    def pause_s(self, decisions: list[Decision], waited_s: float) -> float | None:
        """How long to sleep before the next try, None when the request may go; raises when waiting cannot help."""
        wait_s = pause_s(decisions, inf if self._timeout is None else self._timeout - waited_s)
        if wait_s is None and not all(decisions):
            raise LimitExceeded(describe(closest(decisions)), decisions)
        return wait_s


class Outgoing(_Quota):
    """For threads."""

    def __init__(self, limits: LimitsLike, *, limiter: Limiter | None = None, **options: Any) -> None:
        super().__init__(limits, **options)
        self._limiter = Limiter() if limiter is None else limiter
        self._sleep: Callable[[float], object] = time.sleep

    def admit(self, request: Any) -> None:
        """Return when the request may go; `LimitExceeded` if it would have to wait for too long."""
        batch = self.batch(request)
        waited_s = 0.0
        while (wait_s := self.pause_s(self._limiter.limit_many(batch), waited_s)) is not None:
            self._sleep(wait_s)
            waited_s += wait_s


class AsyncOutgoing(_Quota):
    """For tasks."""

    def __init__(self, limits: LimitsLike, *, limiter: AsyncLimiter | None = None, **options: Any) -> None:
        super().__init__(limits, **options)
        self._limiter = AsyncLimiter() if limiter is None else limiter
        self._sleep: Callable[[float], Any] = asyncio.sleep

    async def admit(self, request: Any) -> None:
        """Return when the request may go; `LimitExceeded` if it would have to wait for too long."""
        batch = self.batch(request)
        waited_s = 0.0
        while (wait_s := self.pause_s(await self._limiter.limit_many(batch), waited_s)) is not None:
            await self._sleep(wait_s)
            waited_s += wait_s
