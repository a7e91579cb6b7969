"""`limit`, `multiLimit` and `liveness`: what they check, in which order, and what they answer.

Order of checks: size (the protocol's), schema, caller, quota of the workspace, namespace, permission. Both limit
operations have a short way that touches nothing but memory. Whatever it cannot settle goes the long way, which does
the same with waiting allowed. The short way consumes nothing before it is certain to end there, except the quota of
the workspace, which it hands on.

HTTP is known here as (head, body) in and (status, header lines, body) out, no more.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from random import random
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.core.model import Decision, Limit, Request
from tidegate.runtime.limiter import AsyncLimiter
from tidegate.server.api.admission import Admission, Admissions, missing_permission, over_quota, quota_lines
from tidegate.server.api.plans import Plan
from tidegate.server.api.problems import (
    INVALID_INPUT,
    JSON_LINE,
    NAMESPACE_GONE,
    Answer,
    FieldError,
    Meta,
    Refusal,
    error_answer,
)
from tidegate.server.api.schema import LimitBody, decode_limit, decode_multi_limit
from tidegate.server.catalog.overrides import Override
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import NamespaceView, WorkspaceView
from tidegate.server.messages import Head, Route
from tidegate.telemetry.topk import SpaceSaving, Thinning

__all__ = ["Api"]

# Plans and matches kept ready, in two generations of this many. Whoever draws limits at random replaces his own.
PLANS_MAX: Final = 16_384
MATCHES_MAX: Final = 65_536
# The most denied identifiers are known to within 1 % of all denials.
TOP_CAPACITY: Final = 100
# So many in a second are all noted; of more, one in some: the statistics must not cost more than the answers.
DENIALS_NOTED_PER_S: Final = 1_000
FLOOD_WEIGHT: Final = 16

ENCODE: Final = msgspec.json.Encoder().encode


Judgement = tuple[Plan, Override | None]
"""What a request will be judged by: the plan, and the override that it comes from."""


class MultiLimitItem(msgspec.Struct, gc=False, rename={"override_id": "overrideId"}):
    """One item of an answer of `multiLimit`."""

    namespace: str
    identifier: str
    limit: int
    remaining: int
    reset: int
    passed: bool
    override_id: str | UnsetType = UNSET


class MultiLimitData(msgspec.Struct):
    passed: bool
    limits: list[MultiLimitItem]


class MultiLimitEnvelope(msgspec.Struct):
    meta: Meta
    data: MultiLimitData


class Api:
    """The operations on counters. Those on overrides are in `override_api`."""

    def __init__(
        self, limiter: AsyncLimiter, sync: CatalogSync, admissions: Admissions, *, test_mode: bool = False
    ) -> None:
        self._limiter = limiter
        self._sync = sync
        self._admissions = admissions
        self._test_mode = test_mode
        self._plans: dict[tuple[NamespaceView, int, int], Plan] = {}
        self._plans_before: dict[tuple[NamespaceView, int, int], Plan] = {}
        self._matches: dict[tuple[object, str], Override | None] = {}
        self._matches_before: dict[tuple[object, str], Override | None] = {}
        self.top_denials: SpaceSaving[tuple[str, str, str]] = SpaceSaving(TOP_CAPACITY)
        self._thinning = Thinning(DENIALS_NOTED_PER_S, FLOOD_WEIGHT, random)
        # Bound once: the short way looks up nothing twice.
        self._decide = limiter.attempt
        self._decide_many = limiter.attempt_many
        self._request_id = admissions.request_id
        self._now_ms = admissions.now_ms
        self._caller = admissions.auth.caller

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v2/ratelimit.limit", "limit", self.limit),
            Route("POST", "/v2/ratelimit.multiLimit", "multiLimit", self.multi_limit),
            Route("GET", "/v2/liveness", "liveness", self.liveness),
        ]

    def liveness(self, head: Head, body: bytes) -> Answer:
        message = f'{{"meta":{{"requestId":"req_{self._request_id()}"}},"data":{{"message":"OK"}}}}'
        return 200, JSON_LINE, message.encode("ascii")

    # limit

    def limit(self, head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
        request_id = self._request_id()
        try:
            call = decode_limit(body)
            now_ms = self._now_ms()
            caller = self._caller(head, now_ms)
        except Refusal as refusal:
            return error_answer(refusal, request_id, head.accept)
        if caller is None or (self._test_mode and head.test_time is not None):
            return self._limit_slowly(head, call, request_id)
        workspace = caller.workspace
        assert workspace is not None
        namespace = workspace.namespaces.get(call.namespace)
        if namespace is None or namespace.is_deleted:
            return self._limit_slowly(head, call, request_id)
        if not caller.can_limit and not caller.may("limit", namespace.id):
            return self._limit_slowly(head, call, request_id)
        lines = b""
        if workspace.quota is not None:
            quota = self._decide(workspace.quota, workspace.id, 1, now_ms)
            if quota is None:
                return self._limit_slowly(head, call, request_id)
            if not quota.allowed:
                return error_answer(over_quota(quota, now_ms), request_id, head.accept)
            lines = quota_lines(quota, now_ms)
        override = self._override(namespace, call.identifier) if namespace.has_overrides else None
        if override is None:
            plan = self._plans.get((namespace, call.limit, call.duration))
            if plan is None:
                plan = self._plan(workspace, namespace, call.limit, call.duration)
        else:
            plan = self._plan(workspace, namespace, override.limit, override.duration_ms)
        cost = 1 if call.cost is UNSET else call.cost
        decision = self._decide(plan.limit, call.identifier, cost, now_ms)
        if decision is None:
            return self._limit_slowly(head, call, request_id, Admission(caller, workspace, lines))
        if not head.metrics_off:
            workspace.decisions += 1
            if not decision.allowed:
                self._note_denial(plan, call.identifier, now_ms)
        return plan.answer(request_id, override, decision, now_ms, lines)

    def _limit_slowly(
        self, head: Head, call: LimitBody, request_id: str, admission: Admission | None = None
    ) -> Coroutine[Any, Any, Answer]:
        work = partial(self._limit_after_admission, head, call, request_id)
        return self._admissions.serve(head, request_id, work, admission)

    async def _limit_after_admission(
        self, head: Head, call: LimitBody, request_id: str, admission: Admission
    ) -> Answer:
        (judgement,) = await self._judgements([call], admission)
        plan, override = judgement
        test_time_ms = self._test_time_ms(head)
        cost = 1 if call.cost is UNSET else call.cost
        decision = await self._limiter.limit(plan.limit, call.identifier, cost, now_ms=test_time_ms)
        now_ms = self._now_ms() if test_time_ms is None else test_time_ms
        if not head.metrics_off:
            plan.workspace.decisions += 1
            if not decision.allowed:
                self._note_denial(plan, call.identifier, now_ms)
        return plan.answer(request_id, override, decision, now_ms, admission.lines)

    # multiLimit

    def multi_limit(self, head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
        request_id = self._request_id()
        try:
            calls = decode_multi_limit(body)
            now_ms = self._now_ms()
            caller = self._caller(head, now_ms)
        except Refusal as refusal:
            return error_answer(refusal, request_id, head.accept)
        if caller is None or (self._test_mode and head.test_time is not None):
            return self._multi_limit_slowly(head, calls, request_id)
        workspace = caller.workspace
        assert workspace is not None
        known = workspace.namespaces
        # Items of a batch often differ in nothing but their identifier: what judged one judges the next.
        last = calls[0]
        usual: Judgement | None = None
        judgements: list[Judgement] = []
        requests: list[tuple[Limit, str, int]] = []
        for call in calls:
            if (
                usual is not None
                and call.limit == last.limit
                and call.duration == last.duration
                and call.namespace == last.namespace
            ):
                judgement = usual
            else:
                namespace = known.get(call.namespace)
                if (
                    namespace is None
                    or namespace.is_deleted
                    or not (caller.can_limit or caller.may("limit", namespace.id))
                ):
                    return self._multi_limit_slowly(head, calls, request_id)
                judgement = self._judgement(workspace, namespace, call)
                usual = None if namespace.has_overrides else judgement
                last = call
            judgements.append(judgement)
            cost = call.cost
            requests.append((judgement[0].limit, call.identifier, 1 if cost is UNSET else cost))
        lines = b""
        if workspace.quota is not None:
            quota = self._decide(workspace.quota, workspace.id, 1, now_ms)
            if quota is None:
                return self._multi_limit_slowly(head, calls, request_id)
            if not quota.allowed:
                return error_answer(over_quota(quota, now_ms), request_id, head.accept)
            lines = quota_lines(quota, now_ms)
        decisions = self._decide_many(requests, now_ms)
        if decisions is None:
            return self._multi_limit_slowly(head, calls, request_id, Admission(caller, workspace, lines))
        return self._multi_limit_answer(head, request_id, calls, judgements, decisions, lines)

    def _multi_limit_slowly(
        self, head: Head, calls: list[LimitBody], request_id: str, admission: Admission | None = None
    ) -> Coroutine[Any, Any, Answer]:
        work = partial(self._multi_limit_after_admission, head, calls, request_id)
        return self._admissions.serve(head, request_id, work, admission)

    async def _multi_limit_after_admission(
        self, head: Head, calls: list[LimitBody], request_id: str, admission: Admission
    ) -> Answer:
        judgements = await self._judgements(calls, admission)
        requests = [
            Request(plan.limit, call.identifier, 1 if call.cost is UNSET else call.cost)
            for call, (plan, _) in zip(calls, judgements, strict=True)
        ]
        decisions = await self._limiter.limit_many(requests, now_ms=self._test_time_ms(head))
        return self._multi_limit_answer(head, request_id, calls, judgements, decisions, admission.lines)

    def _multi_limit_answer(
        self,
        head: Head,
        request_id: str,
        calls: Sequence[LimitBody],
        judgements: Sequence[Judgement],
        decisions: Sequence[Decision],
        lines: bytes,
    ) -> Answer:
        items = [
            MultiLimitItem(
                call.namespace,
                call.identifier,
                decision.limit.quota,
                decision.remaining,
                decision.reset_at_ms,
                decision.allowed,
                UNSET if override is None else override.id,
            )
            for call, (_, override), decision in zip(calls, judgements, decisions, strict=True)
        ]
        passed = False not in [item.passed for item in items]
        if not head.metrics_off:
            judgements[0][0].workspace.decisions += len(items)
            if not passed:
                now_ms = self._now_ms()
                for call, (plan, _), decision in zip(calls, judgements, decisions, strict=True):
                    if not decision.allowed:
                        self._note_denial(plan, call.identifier, now_ms)
        envelope = MultiLimitEnvelope(Meta("req_" + request_id), MultiLimitData(passed, items))
        return 200, JSON_LINE + lines, ENCODE(envelope)

    # What a request is judged by

    async def _judgements(self, calls: Sequence[LimitBody], admission: Admission) -> list[Judgement]:
        """For every call: its namespace is there (or is created now), is not deleted, and the caller may limit in it.

        One that is gone refuses them all, before anything is created or permissions are looked at.
        """
        caller, workspace, _ = admission
        wanted = dict.fromkeys(call.namespace for call in calls)
        if not caller.can_create and any(name not in workspace.namespaces for name in wanted):
            await self._sync.confirm()  # somebody else may have created it a moment ago
            workspace = self._sync.view.workspaces.get(workspace.id, workspace)
        for name in wanted:
            found = workspace.namespaces.get(name)
            if found is not None and found.is_deleted:
                raise _gone(name)
        unknown = [name for name in wanted if name not in workspace.namespaces]
        if unknown and not caller.can_create:
            raise missing_permission("create_namespace", None)
        if unknown and not caller.can_limit:
            raise missing_permission("limit", None)  # and nothing is created for nothing
        namespaces = {}
        for name in wanted:
            namespace = workspace.namespaces.get(name)
            if namespace is None:
                namespace = await self._sync.create_namespace(workspace, name)
                if namespace.is_deleted:
                    raise _gone(name)
            elif not caller.may("limit", namespace.id):
                raise missing_permission("limit", namespace)
            namespaces[name] = namespace
        return [self._judgement(workspace, namespaces[call.namespace], call) for call in calls]

    def _judgement(self, workspace: WorkspaceView, namespace: NamespaceView, call: LimitBody) -> Judgement:
        override = self._override(namespace, call.identifier) if namespace.has_overrides else None
        if override is None:
            return self._plan(workspace, namespace, call.limit, call.duration), None
        return self._plan(workspace, namespace, override.limit, override.duration_ms), override

    def _plan(self, workspace: WorkspaceView, namespace: NamespaceView, quota: int, duration_ms: int) -> Plan:
        key = (namespace, quota, duration_ms)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans_before.get(key) or Plan(workspace, namespace, quota, duration_ms)
            if len(self._plans) >= PLANS_MAX:
                self._plans_before = self._plans
                self._plans = {}
            self._plans[key] = plan
        return plan

    def _override(self, namespace: NamespaceView, identifier: str) -> Override | None:
        if not namespace.matcher.has_patterns:
            return namespace.matcher.get(identifier)
        key = (namespace.token, identifier)
        for known in (self._matches, self._matches_before):
            if key in known:
                return known[key]
        found = namespace.matcher.find(identifier)
        if len(self._matches) >= MATCHES_MAX:
            self._matches_before = self._matches
            self._matches = {}
        self._matches[key] = found
        return found

    def _note_denial(self, plan: Plan, identifier: str, now_ms: int) -> None:
        """For the most denied identifiers."""
        weight = self._thinning.weight(now_ms // 1000)
        if weight:
            self.top_denials.add((plan.workspace.id, plan.namespace.name, identifier), weight)

    def _test_time_ms(self, head: Head) -> int | None:
        """The request's own time: in test mode only."""
        if not self._test_mode or head.test_time is None:
            return None
        if not head.test_time.isdigit() or len(head.test_time) > 15:
            error = FieldError(
                "/headers/X-Test-Time", "header 'X-Test-Time' must be Unix time in milliseconds"
            )
            raise Refusal(INVALID_INPUT, "The header X-Test-Time is not a time", errors=[error])
        return int(head.test_time)


def _gone(name: str) -> Refusal:
    shown = name if len(name) <= 64 else name[:61] + "..."
    return Refusal(NAMESPACE_GONE, f"The namespace {shown!r} has been deleted.")
