"""`limit`, `multiLimit` and `liveness`: what they check, in which order, and what they answer.

Order of checks: size (by the connection), schema, caller, quota of the workspace, namespace, permission. Where the
schema needs a second, slower look at the body, the caller comes first (`Admission.settle`). A warm request reads
nothing but memory; a step that memory cannot answer waits, and the operation continues there (see `admission`). Most
requests of `limit` and `multiLimit` never come here: `warm` answers them.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from random import random
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import astuple

from tidegate.core.model import Decision, Limit, Request
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.server.api.activity import Activity, Sample
from tidegate.server.api.admission import Admission, Call, Steps, missing_permission, wait
from tidegate.server.api.plans import Plan, Plans
from tidegate.server.api.problems import NAMESPACE_GONE, Meta, Refusal, invalid
from tidegate.server.api.schema import (
    CounterBody,
    LimitBody,
    decode_limit,
    decode_limit_plain,
    decode_multi_limit,
    decode_multi_limit_plain,
)
from tidegate.server.api.warm import Bodies, WarmLimit
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView
from tidegate.server.messages import JSON_LINE, Answer, Head, Route
from tidegate.telemetry.topk import SpaceSaving, Thinning

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
    exceeded: bool | UnsetType = UNSET


class MultiLimitData(msgspec.Struct):
    passed: bool
    limits: list[MultiLimitItem]


class MultiLimitEnvelope(msgspec.Struct):
    meta: Meta
    data: MultiLimitData


def item_answers(
    items: list[LimitBody], plans: list[Plan], decisions: list[Decision]
) -> list[MultiLimitItem]:
    """What a batch answers for its items."""
    return [
        MultiLimitItem(
            item.namespace,
            item.identifier,
            plan.limit.quota,
            decision.remaining,
            decision.reset_at_ms,
            decision.allowed,
            UNSET if plan.override is None else plan.override.id,
            True if decision.allowed and decision.exceeded else UNSET,
        )
        for item, plan, decision in zip(items, plans, decisions, strict=True)
    ]


class LimitOperations:
    """The operations on counters. `overrides` has those on overrides."""

    def __init__(
        self, limiter: AsyncLimiter, sync: CatalogSync, admission: Admission, *, test_mode: bool = False
    ) -> None:
        self._limiter = limiter
        self._sync = sync
        self._admission = admission
        self._test_mode = test_mode
        self.activity = Activity(lambda: limiter.inspection)
        self.plans = Plans(self.activity)
        # The most denied identifiers of this process.
        self.top_denials: SpaceSaving[tuple[str, str, str]] = SpaceSaving(TOP_CAPACITY)
        # Bound once, for every request.
        self._attempt = limiter.attempt
        self._attempt_many = limiter.attempt_many
        self._now_ms = admission.now_ms
        self._admit = admission.admit
        self._warm = WarmLimit(
            Bodies(decode_limit_plain, decode_multi_limit_plain, astuple, UNSET),
            admission.callers,
            self.plans,
            admission.new_id,
            limiter.attempt,
            limiter.attempt_many,
            self.activity,
            Thinning(DENIALS_RECORDED_PER_S, SAMPLE_WEIGHT, random),
            self._record_denial,
            self._wait_for_decision,
            self._wait_for_batch,
            admission.handler("limit", self.limit),
            admission.handler("multiLimit", self.multi_limit),
            test_mode,
        )

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v2/ratelimit.limit", "limit", self._warm.handle),
            Route("POST", "/v2/ratelimit.multiLimit", "multiLimit", self._warm.handle_batch),
            Route("GET", "/v2/liveness", "liveness", self.liveness),
        ]

    def liveness(self, _head: Head, _body: bytes) -> Answer:
        message = f'{{"meta":{{"requestId":"req_{self._admission.new_id()}"}},"data":{{"message":"OK"}}}}'
        return 200, JSON_LINE, message.encode("ascii")

    def limit(self, call: Call, body: bytes) -> Steps[None]:
        sample = self.activity.take()
        item: LimitBody = yield from self._admission.body(call, decode_limit, body)
        head = call.head
        test_time_ms = self.test_time_ms(head) if self._test_mode else None
        caller = yield from self._admit(call)
        namespace = caller.limited_namespace(item.namespace)
        if namespace is None:
            namespace = (yield from self.namespaces(caller, [item]))[item.namespace]
        plan = yield from self.plan(caller.workspace.id, namespace, item)
        cost = 1 if item.cost is UNSET else item.cost
        now_ms = self._now_ms() if test_time_ms is None else test_time_ms
        decision = self._attempt(plan.limit, item.identifier, cost, now_ms)
        if decision is None:
            decision = yield from wait(
                self._limiter.limit, plan.limit, item.identifier, cost, now_ms=test_time_ms
            )
            now_ms = self._now_ms() if test_time_ms is None else test_time_ms
        if not head.metrics_off:
            self._warm.record(plan, item.identifier, cost, decision, now_ms, sample)
        call.answer = plan.answer(call.request_id, decision, now_ms, call.lines)

    def _wait_for_decision(
        self, head: Head, request_id: str, plan: Plan, identifier: str, cost: int, sample: Sample | None
    ) -> Answer | Coroutine[Any, Any, Answer]:
        """The rest of a warm `limit` that memory cannot decide."""
        call = Call("limit", head, request_id)

        def steps() -> Steps[None]:
            decision = yield from wait(self._limiter.limit, plan.limit, identifier, cost)
            now_ms = self._now_ms()
            if not head.metrics_off:
                self._warm.record(plan, identifier, cost, decision, now_ms, sample)
            call.answer = plan.answer(request_id, decision, now_ms, b"")

        return self._admission.run(call, steps())

    def multi_limit(self, call: Call, body: bytes) -> Steps[None]:
        sample = self.activity.take()
        items = yield from self._admission.body(call, decode_multi_limit, body)
        test_time_ms = self.test_time_ms(call.head) if self._test_mode else None
        caller = yield from self._admit(call, len(items))
        namespaces = yield from self.namespaces(caller, items)
        plans: list[Plan] = []
        requests: list[tuple[Limit, str, int]] = []
        for item in items:
            plan = yield from self.plan(caller.workspace.id, namespaces[item.namespace], item)
            plans.append(plan)
            requests.append((plan.limit, item.identifier, 1 if item.cost is UNSET else item.cost))
        decisions = self._attempt_many(requests, test_time_ms)
        yield from self._finish_batch(call, items, plans, requests, decisions, test_time_ms, sample)

    def _wait_for_batch(
        self,
        head: Head,
        request_id: str,
        items: list[LimitBody],
        plans: list[Plan],
        requests: list[tuple[Limit, str, int]],
        sample: Sample | None,
    ) -> Answer | Coroutine[Any, Any, Answer]:
        """The rest of a warm `multiLimit` that memory cannot decide."""
        call = Call("multiLimit", head, request_id)
        steps = self._finish_batch(call, items, plans, requests, None, None, sample)
        return self._admission.run(call, steps)

    def _finish_batch(
        self,
        call: Call,
        items: list[LimitBody],
        plans: list[Plan],
        requests: list[tuple[Limit, str, int]],
        decisions: list[Decision] | None,
        test_time_ms: int | None,
        sample: Sample | None,
    ) -> Steps[None]:
        """The answer of a batch, after a wait if memory could not decide it."""
        if decisions is None:
            batch = [Request(*request) for request in requests]
            decisions = yield from wait(self._limiter.limit_many, batch, now_ms=test_time_ms)
        limits = item_answers(items, plans, decisions)
        passed = all(decisions)
        if not call.head.metrics_off:
            self._warm.record_batch(requests, plans, decisions, passed, sample)
        envelope = MultiLimitEnvelope(Meta("req_" + call.request_id), MultiLimitData(passed, limits))
        call.answer = 200, JSON_LINE + call.lines, ENCODE(envelope)

    def plan(self, workspace_id: str, namespace: NamespaceView, item: CounterBody) -> Steps[Plan]:
        """The limit to apply, after a wait if many patterns had to be tried for this workspace."""
        if namespace.has_overrides:
            yield from self._admission.spend(workspace_id, self.plans.cost(namespace, item.identifier))
        return self.plans.find(workspace_id, namespace, item.identifier, item.limit, item.duration)

    def namespaces(self, caller: Caller, items: Sequence[LimitBody]) -> Steps[dict[str, NamespaceView]]:
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

    def _record_denial(
        self, plan: Plan, identifier: str, decision: Decision, cost: int, now_ms: int, weight: int
    ) -> None:
        """For the list of most denied identifiers, and for explanations in the console. What a limit in shadow mode
        would have denied is kept for explanations."""
        key = (plan.limit.workspace, plan.namespace.name, identifier)
        if not decision.allowed:
            self.top_denials.add(key, weight)
        self.activity.record_denial(key, plan.limit, plan.override, decision, cost, now_ms, weight)

    def test_time_ms(self, head: Head) -> int | None:
        """The time that a request sets for itself, in test mode."""
        if head.test_time is None or not self._test_mode:
            return None
        if not head.test_time.isdigit() or len(head.test_time) > 15:
            message = "header 'X-Test-Time' must be Unix time in milliseconds"
            raise invalid("/headers/X-Test-Time", message, "The header X-Test-Time is not a time")
        return int(head.test_time)


def _gone(name: str) -> Refusal:
    shown = name if len(name) <= 64 else name[:61] + "..."
    return Refusal(NAMESPACE_GONE, f"The namespace {shown!r} has been deleted.")
