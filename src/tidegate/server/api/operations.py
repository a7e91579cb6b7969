"""`limit`, `multiLimit` and `liveness`: what they check, in which order, and what they answer.

Order of checks: size (by the connection), schema, caller, quota of the workspace, namespace, permission. Where the
schema needs a second, slower look at the body, the caller comes first (`Admission.settle`). A warm request reads
nothing but memory; a step that memory cannot answer waits, and the operation continues there (see `admission`).

An answer of `limit` is written as text: every value is a number, a truth value or an id of ours, so that nothing needs
escaping. What does not change from request to request is put together once per `Plan`, and once per window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import random
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.core.header_fields import INTEGER_MAX, policy_name, policy_value, whole_seconds
from tidegate.core.model import Decision, Limit, Request, make_limit
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.server.api.activity import Activity, Counts, Sample
from tidegate.server.api.admission import Admission, Call, Steps, missing_permission, wait
from tidegate.server.api.problems import (
    INVALID_INPUT,
    JSON_LINE,
    NAMESPACE_GONE,
    FieldError,
    Meta,
    Refusal,
)
from tidegate.server.api.schema import CounterBody, Doubt, LimitBody, decode_limit, decode_multi_limit
from tidegate.server.catalog.overrides import Override
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView
from tidegate.server.messages import Answer, Head, Route
from tidegate.telemetry.topk import SpaceSaving, Thinning

__all__ = ["LimitOperations", "MultiLimitItem", "Plan", "item_answer"]

# Plans and matches that are kept, in two generations of this many: a client that sends random limits fills no memory.
PLANS_MAX: Final = 16_384
MATCHES_MAX: Final = 65_536
# The most denied identifiers are known to within 1 % of all denials.
TOP_CAPACITY: Final = 100
# Up to this many denials in a second are all recorded; above it a sample, so that statistics cost less than answers.
DENIALS_RECORDED_PER_S: Final = 1_000
SAMPLE_WEIGHT: Final = 16

ENCODE: Final = msgspec.json.Encoder().encode


class Plan:
    """The limit to apply to a check, the override that it comes from, and the fixed parts of its answers."""

    __slots__ = (
        "_allowed",
        "_denied",
        "_end",
        "_is_plain",
        "_lines",
        "_reset_at_ms",
        "_reset_text",
        "_retry_fields",
        "_retry_s",
        "counts",
        "limit",
        "namespace",
        "override",
    )

    def __init__(
        self,
        workspace_id: str,
        namespace: NamespaceView,
        quota: int,
        duration_ms: int,
        override: Override | None = None,
        counts: Counts | None = None,
    ) -> None:
        self.namespace = namespace
        self.override = override
        self.counts = Counts() if counts is None else counts
        is_shadow = override is not None and override.shadow
        self.limit = make_limit(quota, duration_ms, namespace.id, workspace_id, shadow=is_shadow)
        name = policy_name(namespace.name, namespace.id)
        # Up to the remaining quota, where answers begin to differ.
        self._lines = (
            "content-type: application/json\r\n"
            f"ratelimit-policy: {policy_value(name, quota, duration_ms)}\r\nratelimit: {name};r="
        )
        self._allowed = f'"}},"data":{{"success":true,"limit":{quota},"remaining":'
        self._denied = f'"}},"data":{{"success":false,"limit":{quota},"remaining":0'
        self._end = "}}" if override is None else f',"overrideId":"{override.id}"}}}}'
        # No number of an answer is too large for a header field.
        self._is_plain = quota <= INTEGER_MAX and duration_ms <= INTEGER_MAX
        # The end of the window that was answered last, and its text.
        self._reset_at_ms = -1
        self._reset_text = ""
        # The wait of the last denial, and its header lines: many denials in a row have the same.
        self._retry_s = 0
        self._retry_fields = b""

    def answer(self, request_id: str, decision: Decision, now_ms: int, lines: bytes) -> Answer:
        """The answer of `limit`; `lines` are further header lines."""
        reset_at_ms = decision.reset_at_ms
        if reset_at_ms != self._reset_at_ms:
            self._reset_at_ms = reset_at_ms
            self._reset_text = f',"reset":{reset_at_ms}{self._end}'
        if decision.allowed:
            remaining = str(decision.remaining)
            text = f'{{"meta":{{"requestId":"req_{request_id}{self._allowed}{remaining}{self._reset_text}'
            if decision.exceeded:
                text = f'{text[:-2]},"exceeded":true}}}}'
            if self._is_plain and reset_at_ms > now_ms:
                # The usual case of `allowed_line` without a call, because every allowed check comes here.
                shown = f"{self._lines}{remaining};t={-((now_ms - reset_at_ms) // 1000)}\r\n"
            else:
                shown = self._lines + allowed_line(decision.remaining, reset_at_ms - now_ms)
            fields = shown.encode()
        else:
            text = f'{{"meta":{{"requestId":"req_{request_id}{self._denied}{self._reset_text}'
            retry_after_ms = decision.retry_after_ms
            retry_s = -(-retry_after_ms // 1000) if retry_after_ms else 0
            if retry_s == 0 or retry_s != self._retry_s:
                shown = self._lines + denied_line(retry_after_ms, reset_at_ms - now_ms)
                self._retry_fields = shown.encode()
                self._retry_s = retry_s
            fields = self._retry_fields
        return 200, fields + lines, text.encode()


class Plans:
    """Finds the plan of a check, and keeps recent ones."""

    __slots__ = ("_activity", "_before", "_matches", "_matches_before", "recent")

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        # By namespace, and by override or by quota and duration.
        self.recent: dict[tuple[NamespaceView, int, int] | tuple[NamespaceView, Override], Plan] = {}
        self._before: dict[tuple[NamespaceView, int, int] | tuple[NamespaceView, Override], Plan] = {}
        self._matches: dict[tuple[object, str], Override | None] = {}
        self._matches_before: dict[tuple[object, str], Override | None] = {}

    def find(self, workspace_id: str, namespace: NamespaceView, item: CounterBody) -> Plan:
        override = self._override(namespace, item.identifier) if namespace.has_overrides else None
        key = (namespace, item.limit, item.duration) if override is None else (namespace, override)
        plan = self.recent.get(key)
        if plan is None:
            plan = self._before.get(key)
            if plan is None:
                quota, duration_ms = (item.limit, item.duration) if override is None else override[2:4]
                counts = self._activity.counts(workspace_id, namespace.name)
                plan = Plan(workspace_id, namespace, quota, duration_ms, override, counts)
                if override is None:
                    self._activity.note_quota(plan.limit)
            if len(self.recent) >= PLANS_MAX:
                self._before = self.recent
                self.recent = {}
            self.recent[key] = plan
        return plan

    def cost(self, namespace: NamespaceView, identifier: str) -> int:
        """What `find` will spend on patterns, at most."""
        if not namespace.matcher.has_patterns:
            return 0
        key = (namespace.token, identifier)
        return 0 if key in self._matches or key in self._matches_before else namespace.matcher.cost

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


def item_answer(item: LimitBody, plan: Plan, decision: Decision) -> MultiLimitItem:
    """What a batch answers for one item."""
    return MultiLimitItem(
        item.namespace,
        item.identifier,
        decision.limit.quota,
        decision.remaining,
        decision.reset_at_ms,
        decision.allowed,
        UNSET if plan.override is None else plan.override.id,
        True if decision.allowed and decision.exceeded else UNSET,
    )


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
        self.activity = Activity(lambda: limiter.inspection)
        self._followed = self.activity.recording.followed
        self.plans = Plans(self.activity)
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
        activity = self.activity
        if activity.skip:
            activity.skip -= 1
            sample = None
        else:
            sample = activity.begin()
        try:
            item = decode_limit(body)
        except Doubt as doubt:
            item = yield from self._admission.settle(call, doubt)
        head = call.head
        test_time_ms = self.test_time_ms(head) if self._test_mode else None
        caller = self._recall(head.authorization)
        if caller is None or caller.is_metered:
            caller = yield from self._admit(call)
        workspace = caller.workspace
        namespace = workspace.namespaces.get(item.namespace)
        if (
            namespace is None
            or namespace.is_deleted
            or not (caller.can_limit or caller.may("limit", namespace.id))
        ):
            namespace = (yield from self.namespaces(caller, [item]))[item.namespace]
        plan = self.plans.recent.get((namespace, item.limit, item.duration))
        if plan is None or namespace.has_overrides:
            plan = yield from self.plan(workspace.id, namespace, item)
        cost = 1 if item.cost is UNSET else item.cost
        now_ms = self._now_ms() if test_time_ms is None else test_time_ms
        decision = self._attempt(plan.limit, item.identifier, cost, now_ms)
        if decision is None:
            decision = yield from wait(
                self._limiter.limit, plan.limit, item.identifier, cost, now_ms=test_time_ms
            )
            now_ms = self._now_ms() if test_time_ms is None else test_time_ms
        if not head.metrics_off:
            self.decisions[workspace.id] += 1
            if decision.exceeded:
                self._record_denial(plan, item.identifier, decision, cost, now_ms)
            else:
                plan.counts.allowed += 1
            followed = self._followed.get(item.identifier)
            if followed is None and sample is not None:
                followed = activity.follow(item.identifier)
            if followed is not None:
                followed.add(plan.limit, cost, not decision.exceeded, now_ms)
            if sample is not None:
                activity.end(sample, (workspace.id, namespace.name, item.identifier))
        call.answer = plan.answer(call.request_id, decision, now_ms, call.lines)

    def multi_limit(self, call: Call, body: bytes) -> Steps[None]:
        activity = self.activity
        if activity.skip:
            activity.skip -= 1
            sample = None
        else:
            sample = activity.begin()
        items = yield from self._admission.body(call, decode_multi_limit, body)
        test_time_ms = self.test_time_ms(call.head) if self._test_mode else None
        caller = self._recall(call.head.authorization)
        if caller is None or caller.is_metered:
            caller = yield from self._admit(call, len(items))
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
                    namespaces = yield from self.namespaces(caller, items)
                    namespace = namespaces[item.namespace]
                plan = yield from self.plan(caller.workspace.id, namespace, item)
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
        limits = list(map(item_answer, items, plans, decisions))
        passed = False not in [each.passed for each in limits]
        if not call.head.metrics_off:
            self.decisions[caller.workspace.id] += len(limits)
            self._record_batch(requests, plans, decisions, passed, now_ms, sample)
        envelope = MultiLimitEnvelope(Meta("req_" + call.request_id), MultiLimitData(passed, limits))
        call.answer = 200, JSON_LINE + call.lines, ENCODE(envelope)

    def plan(self, workspace_id: str, namespace: NamespaceView, item: CounterBody) -> Steps[Plan]:
        """The limit to apply, after a wait if many patterns had to be tried for this workspace."""
        if namespace.has_overrides:
            yield from self._admission.spend(workspace_id, self.plans.cost(namespace, item.identifier))
        return self.plans.find(workspace_id, namespace, item)

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

    def _record_batch(
        self,
        requests: Sequence[tuple[Limit, str, int]],
        plans: Sequence[Plan],
        decisions: Sequence[Decision],
        passed: bool,
        now_ms: int,
        sample: Sample | None,
    ) -> None:
        activity = self.activity
        for (_, identifier, cost), plan, decision in zip(requests, plans, decisions, strict=True):
            if decision.exceeded:
                self._record_denial(plan, identifier, decision, cost, now_ms)
            else:
                plan.counts.allowed += 1
            # An item that fits, of a batch that does not, consumed nothing and was not denied by its own limit.
            if passed or not decision.allowed:
                followed = self._followed.get(identifier)
                if followed is None and sample is not None:
                    followed = activity.follow(identifier)
                if followed is not None:
                    followed.add(plan.limit, cost, passed, now_ms)
            if sample is not None:
                activity.end(sample, (plan.limit.workspace, plan.namespace.name, identifier))

    def _record_denial(self, plan: Plan, identifier: str, decision: Decision, cost: int, now_ms: int) -> None:
        """For the list of most denied identifiers, and for explanations in the console. What a limit in shadow mode
        would have denied counts as allowed, and is kept for explanations."""
        if decision.allowed:
            plan.counts.allowed += 1
        else:
            plan.counts.denied += 1
        weight = self._thinning.weight(now_ms // 1000)
        if weight:
            key = (plan.limit.workspace, plan.namespace.name, identifier)
            if not decision.allowed:
                self.top_denials.add(key, weight)
            self.activity.record_denial(key, plan.limit, plan.override, decision, cost, now_ms, weight)

    def test_time_ms(self, head: Head) -> int | None:
        """The time that a request sets for itself, in test mode."""
        if head.test_time is None or not self._test_mode:
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


def allowed_line(remaining: int, reset_in_ms: int) -> str:
    """The rest of `RateLimit` on an allowed call."""
    return f"{min(remaining, INTEGER_MAX)};t={whole_seconds(reset_in_ms)}\r\n"


def denied_line(retry_after_ms: int | None, reset_in_ms: int) -> str:
    """The rest of `RateLimit` on a denied call, with the Retry-After that must agree with it.

    A cost above the quota never fits, so there is no Retry-After.
    """
    if retry_after_ms is None:
        return f"0;t={whole_seconds(reset_in_ms)}\r\n"
    seconds = whole_seconds(retry_after_ms)
    return f"0;t={seconds}\r\nretry-after: {seconds}\r\n"
