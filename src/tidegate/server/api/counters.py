"""`usage`: what counts against a limit for one identifier, and where each part was accepted."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.server.api.admission import Admission, Call, Steps, missing_permission, wait
from tidegate.server.api.operations import LimitOperations
from tidegate.server.api.problems import JSON_LINE, Meta
from tidegate.server.api.schema import decode_usage
from tidegate.server.messages import Route

__all__ = ["CounterOperations", "UsageData"]

ENCODE: Final = msgspec.json.Encoder().encode


class RegionUsage(msgspec.Struct):
    """What one other region has accepted in the current window."""

    region: str
    count: int


class UsageData(msgspec.Struct, rename="camel"):
    """The answer to `usage`: `used` is `regional`, `foreign` and `carried` together. Ages are in milliseconds."""

    limit: int
    duration: int
    used: int
    remaining: int
    reset: int
    own: int
    regional: int
    foreign: int
    carried: int
    regions: list[RegionUsage]
    regional_age: int | UnsetType = UNSET
    global_age: int | UnsetType = UNSET
    override_id: str | UnsetType = UNSET


class UsageEnvelope(msgspec.Struct):
    meta: Meta
    data: UsageData


class CounterOperations:
    """The operations that look at counters. `operations` has those that count."""

    def __init__(self, limiter: AsyncLimiter, limits: LimitOperations, admission: Admission) -> None:
        self._limiter = limiter
        self._limits = limits
        self._admission = admission

    def routes(self) -> list[Route]:
        return [Route("POST", "/v2/ratelimit.usage", "usage", self._admission.handler("usage", self.usage))]

    def usage(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_usage, body)
        test_time_ms = self._limits.test_time_ms(call.head)
        caller = yield from self._admission.admit(call)
        namespace = yield from self._admission.namespace(caller, wanted.namespace)
        if not caller.may("limit", namespace.id):
            raise missing_permission("limit", namespace)
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
            [RegionUsage(*each) for each in sorted(usage.regions.items())],
            UNSET if usage.regional_age_ms is None else usage.regional_age_ms,
            UNSET if usage.global_age_ms is None else usage.global_age_ms,
            UNSET if plan.override is None else plan.override.id,
        )
        envelope = UsageEnvelope(Meta("req_" + call.request_id), data)
        call.answer = 200, JSON_LINE + call.lines, ENCODE(envelope)
