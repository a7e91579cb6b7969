"""`limit`, `multiLimit` and `liveness`: what they check, in which order, and what they answer.

Order of checks: size (by the connection), schema, caller, quota of the workspace, namespace, permission. A warm request
reads nothing but memory; a step that memory cannot answer waits, and the operation continues there (see `admission`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import random
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.core.model import Limit, Request
from tidegate.runtime.limiter import AsyncLimiter
from tidegate.server.api.admission import Admission, Call, Steps, missing_permission, wait
from tidegate.server.api.plans import Plan, Plans
from tidegate.server.api.problems import (
    INVALID_INPUT,
    JSON_LINE,
    NAMESPACE_GONE,
    FieldError,
    Meta,
    Refusal,
)
from tidegate.server.api.schema import LimitBody, decode_limit, decode_multi_limit
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView
from tidegate.server.messages import Answer, Head, Route
from tidegate.telemetry.topk import SpaceSaving, Thinning

__all__ = ["LimitOperations"]

# The most denied identifiers are known to within 1 % of all denials.
TOP_CAPACITY: Final = 100
# Up to this many denials in a second are all recorded; above it a sample, so that statistics cost less than answers.
DENIALS_RECORDED_PER_S: Final = 1_000
SAMPLE_WEIGHT: Final = 16

ENCODE: Final = msgspec.json.Encoder().encode


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


class LimitOperations:
    """The operations on counters. `overrides` has those on overrides."""

    def __init__(
        self, limiter: AsyncLimiter, sync: CatalogSync, admission: Admission, *, test_mode: bool = False
    ) -> None:
        self._limiter = limiter
        self._sync = sync
        self._admission = admission
        self._test_mode = test_mode
        self._plans = Plans()
        # Statistics of this process: decisions by workspace id, and the most denied identifiers.
        self.decisions: defaultdict[str, int] = defaultdict(int)
        self.top_denials: SpaceSaving[tuple[str, str, str]] = SpaceSaving(TOP_CAPACITY)
        self._thinning = Thinning(DENIALS_RECORDED_PER_S, SAMPLE_WEIGHT, random)
        # Bound once, for every request.
        self._attempt = limiter.attempt
        self._attempt_many = limiter.attempt_many
        self._now_ms = admission.now_ms
        self._recall = admission.recall
        self._admit = admission.admit

    def routes(self) -> list[Route]:
        handler = self._admission.handler
        return [
            Route("POST", "/v2/ratelimit.limit", "limit", handler("limit", self.limit)),
            Route("POST", "/v2/ratelimit.multiLimit", "multiLimit", handler("multiLimit", self.multi_limit)),
            Route("GET", "/v2/liveness", "liveness", self.liveness),
        ]

    def liveness(self, _head: Head, _body: bytes) -> Answer:
        message = f'{{"meta":{{"requestId":"req_{self._admission.new_id()}"}},"data":{{"message":"OK"}}}}'
        return 200, JSON_LINE, message.encode("ascii")

    def limit(self, call: Call, body: bytes) -> Steps[None]:
        item = decode_limit(body)
        test_time_ms = self._test_time_ms(call.head) if self._test_mode else None
        caller = self._recall(call.head.authorization)
        if caller is None or caller.is_metered:
            caller = yield from self._admit(call)
        namespace = caller.workspace.namespaces.get(item.namespace)
        if (
            namespace is None
            or namespace.is_deleted
            or not (caller.can_limit or caller.may("limit", namespace.id))
        ):
            namespace = (yield from self._namespaces(caller, [item]))[item.namespace]
        plan = self._plans.find(caller.workspace.id, namespace, item)
        cost = 1 if item.cost is UNSET else item.cost
        now_ms = self._now_ms() if test_time_ms is None else test_time_ms
        decision = self._attempt(plan.limit, item.identifier, cost, now_ms)
        if decision is None:
            decision = yield from wait(
                self._limiter.limit, plan.limit, item.identifier, cost, now_ms=test_time_ms
            )
            now_ms = self._now_ms() if test_time_ms is None else test_time_ms
        if not call.head.metrics_off:
            self.decisions[caller.workspace.id] += 1
            if not decision.allowed:
                self._record_denial(plan, item.identifier)
        call.answer = plan.answer(call.request_id, decision, now_ms, call.lines)

    def multi_limit(self, call: Call, body: bytes) -> Steps[None]:
        items = decode_multi_limit(body)
        test_time_ms = self._test_time_ms(call.head) if self._test_mode else None
        caller = self._recall(call.head.authorization)
        if caller is None or caller.is_metered:
            caller = yield from self._admit(call)
        namespaces: Mapping[str, NamespaceView] = caller.workspace.namespaces
        # Items of a batch often differ in nothing but their identifier: then the plan of one is that of the next.
        last = items[0]
        usual: Plan | None = None
        plans: list[Plan] = []
        requests: list[tuple[Limit, str, int]] = []
        for item in items:
            if (
                usual is not None
                and item.limit == last.limit
                and item.duration == last.duration
                and item.namespace == last.namespace
            ):
                plan = usual
            else:
                namespace = namespaces.get(item.namespace)
                if (
                    namespace is None
                    or namespace.is_deleted
                    or not (caller.can_limit or caller.may("limit", namespace.id))
                ):
                    namespaces = yield from self._namespaces(caller, items)
                    namespace = namespaces[item.namespace]
                plan = self._plans.find(caller.workspace.id, namespace, item)
                usual = None if namespace.has_overrides else plan
                last = item
            plans.append(plan)
            cost = item.cost
            requests.append((plan.limit, item.identifier, 1 if cost is UNSET else cost))
        now_ms = self._now_ms() if test_time_ms is None else test_time_ms
        decisions = self._attempt_many(requests, now_ms)
        if decisions is None:
            batch = [Request(*request) for request in requests]
            decisions = yield from wait(self._limiter.limit_many, batch, now_ms=test_time_ms)
        limits = [
            MultiLimitItem(
                item.namespace,
                item.identifier,
                decision.limit.quota,
                decision.remaining,
                decision.reset_at_ms,
                decision.allowed,
                UNSET if plan.override is None else plan.override.id,
            )
            for item, plan, decision in zip(items, plans, decisions, strict=True)
        ]
        passed = False not in [each.passed for each in limits]
        if not call.head.metrics_off:
            self.decisions[caller.workspace.id] += len(limits)
            if not passed:
                for item, plan, decision in zip(items, plans, decisions, strict=True):
                    if not decision.allowed:
                        self._record_denial(plan, item.identifier)
        envelope = MultiLimitEnvelope(Meta("req_" + call.request_id), MultiLimitData(passed, limits))
        call.answer = 200, JSON_LINE + call.lines, ENCODE(envelope)

    def _namespaces(self, caller: Caller, items: Sequence[LimitBody]) -> Steps[dict[str, NamespaceView]]:
        """The namespaces of all items: they exist or are created now, and the caller may limit in them.

        If one is deleted the call is refused, before anything is created and before permissions are checked.
        """
        workspace = caller.workspace
        wanted = dict.fromkeys(item.namespace for item in items)
        if not caller.can_create and any(name not in workspace.namespaces for name in wanted):
            # Another process may have created it a moment ago.
            yield from wait(self._sync.confirm)
            workspace = self._sync.view.workspaces.get(workspace.id, workspace)
        for name in wanted:
            held = workspace.namespaces.get(name)
            if held is not None and held.is_deleted:
                raise _gone(name)
        unknown = [name for name in wanted if name not in workspace.namespaces]
        if unknown and not caller.can_create:
            raise missing_permission("create_namespace", None)
        if unknown and not caller.can_limit:
            raise missing_permission("limit", None)  # before anything is created
        namespaces = {}
        for name in wanted:
            namespace = workspace.namespaces.get(name)
            if namespace is None:
                namespace = yield from wait(self._sync.create_namespace, workspace, name)
                if namespace.is_deleted:
                    raise _gone(name)
            elif not caller.may("limit", namespace.id):
                raise missing_permission("limit", namespace)
            namespaces[name] = namespace
        return namespaces

    def _record_denial(self, plan: Plan, identifier: str) -> None:
        """For the most denied identifiers."""
        weight = self._thinning.weight(self._now_ms() // 1000)
        if weight:
            self.top_denials.add((plan.limit.workspace, plan.namespace.name, identifier), weight)

    def _test_time_ms(self, head: Head) -> int | None:
        """The time that a request sets for itself, in test mode."""
        if head.test_time is None:
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
