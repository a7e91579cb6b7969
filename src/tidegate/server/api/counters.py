"""`usage` and `reset`: what counts against a limit for one identifier, and how to set it back to zero."""

from __future__ import annotations

import logging
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.core.model import Limit
from tidegate.errors import TooManyResets
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.server.api.admission import Admission, Call, Steps, answer, wait
from tidegate.server.api.operations import LimitOperations
from tidegate.server.api.problems import TOO_MANY_RESETS, Refusal
from tidegate.server.api.schema import decode_reset, decode_usage
from tidegate.server.messages import Route

logger: Final = logging.getLogger(__name__)


class RegionUsage(msgspec.Struct):
    """What one other region has accepted in the current window; `age` says how many ms ago that was learned."""

    region: str
    count: int
    age: int | UnsetType = UNSET


class UsageData(msgspec.Struct, rename="camel"):
    """The answer to `usage`: `used` is `regional`, `foreign`, `carried` and `reserved` together. Ages are in ms."""

    limit: int
    duration: int
    used: int
    remaining: int
    reset: int
    own: int
    regional: int
    foreign: int
    carried: int
    reserved: int
    regions: list[RegionUsage]
    regional_age: int | UnsetType = UNSET
    global_age: int | UnsetType = UNSET
    override_id: str | UnsetType = UNSET


class ResetData(msgspec.Struct):
    """The answer to `reset`. `confirmed`: Redis and the database have it; otherwise this node repeats it."""

    duration: int
    confirmed: bool


class CounterOperations:
    """The operations that look at counters or reset them. `operations` has those that count."""

    def __init__(self, limiter: AsyncLimiter, limits: LimitOperations, admission: Admission) -> None:
        self._limiter = limiter
        self._limits = limits
        self._admission = admission

    def routes(self) -> list[Route]:
        return self._admission.routes({"usage": self.usage, "reset": self.reset})

    def usage(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_usage, body)
        test_time_ms = self._limits.test_time_ms(call.head)
        caller = yield from self._admission.admit(call)
        namespace = yield from self._admission.namespace(caller, wanted.namespace, "limit")
        plan = yield from self._limits.plan(caller.workspace.id, namespace, wanted)
        usage = yield from wait(self._limiter.usage, plan.limit, wanted.identifier, now_ms=test_time_ms)
        data = UsageData(
            usage.limit.quota,
            usage.limit.duration_ms,
            usage.used,
            usage.remaining,
            usage.reset_at_ms,
            usage.own,
            usage.regional,
            usage.foreign,
            usage.carried,
            usage.reserved,
            [
                RegionUsage(region, part.counted, UNSET if part.age_ms is None else part.age_ms)
                for region, part in sorted(usage.regions.items())
            ],
            UNSET if usage.regional_age_ms is None else usage.regional_age_ms,
            UNSET if usage.global_age_ms is None else usage.global_age_ms,
            UNSET if plan.override is None else plan.override.id,
        )
        answer(call, data)

    def reset(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_reset, body)
        caller = yield from self._admission.admit(call)
        namespace = yield from self._admission.namespace(caller, wanted.namespace, "reset")
        plan = yield from self._limits.plan(caller.workspace.id, namespace, wanted)
        confirmed = yield from wait(self._reset_now, plan.limit, wanted.identifier)
        logger.info(
            "key %s of workspace %s has reset %r in namespace %r (windows of %d ms)",
            caller.key_id,
            caller.workspace.id,
            wanted.identifier,
            namespace.name,
            plan.limit.duration_ms,
        )
        answer(call, ResetData(plan.limit.duration_ms, confirmed))

    async def _reset_now(self, limit: Limit, identifier: str) -> bool:
        try:
            return await self._limiter.reset(limit, identifier)
        except TooManyResets as error:
            detail = "The workspace has as many live resets as it may; each is remembered for at most four windows."
            raise Refusal(TOO_MANY_RESETS, detail, headers=b"retry-after: 60\r\n") from error
