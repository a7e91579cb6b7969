"""`RateLimitService/ShouldRateLimit`: from a request message to a response message.

All descriptors whose rules enforce are one batch of the limiter, all or nothing. Rules in shadow mode are judged one by
one after it: they count what they would have counted and never deny. A request that is denied consumes nothing, so
shadow rules are then only checked.

Requests repeat: what a message asks for (rules, identifiers, costs) is kept as a `Plan`, by the bytes of the message,
until the rules change. A decision that needs no read is made without a task.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tidegate.core.header_fields import INTEGER_MAX, whole_seconds
from tidegate.core.model import NAME_LENGTH_MAX, Decision, Limit, Request
from tidegate.server.http2.grpc import GrpcError, Status
from tidegate.server.rls.messages import (
    UINT32_MAX,
    Code,
    Descriptor,
    header_to_add,
    parse_request,
    response_start,
    status,
)
from tidegate.server.rls.protobuf import DecodeError, varint
from tidegate.server.rls.rules import Applied, Detail, Rule, RuleSet, identifier_of, inline_rule

SERVICE: Final = "envoy.service.ratelimit.v3.RateLimitService"
PATH: Final = f"/{SERVICE}/ShouldRateLimit"

# Plans of one generation; two are kept. About 600 bytes each.
PLANS_MAX: Final = 16_384
# A longer message is planned each time.
PLAN_MESSAGE_BYTES_MAX: Final = 1_024
# Limits that requests bring themselves: kept to count them, and to encode them once.
INLINE_RULES_MAX: Final = 1_024
# Items in the RateLimit fields. Those with the least remaining quota matter, and a field must stay readable.
POLICIES_SHOWN_MAX: Final = 8

OK_START: Final = response_start(Code.OK)
# A HeaderValue with the key `ratelimit`, up to the length of its value.
RATELIMIT_FIELD: Final = b"\x0a\x09ratelimit\x12"
RATELIMIT_FIELD_EXTRA: Final = len(RATELIMIT_FIELD) + 1


class BatchLimiter(Protocol):
    """What the service needs of a limiter (`AsyncLimiter`), which must have been started."""

    @property
    def attempt_many(self) -> Callable[[list[tuple[Limit, str, int]], int], list[Decision] | None]: ...

    async def limit_many(
        self, requests: Sequence[Request], *, now_ms: int | None = None
    ) -> list[Decision]: ...


@dataclass(slots=True, eq=False)
class Item:
    """One descriptor of a plan."""

    # None: nothing to decide, and the status is always `constant`.
    rule: Rule | None
    values: str = ""
    constant: bytes = b""


@dataclass(slots=True, eq=False)
class Plan:
    """What a message asks for, under the rules as they are."""

    items: list[Item]
    # The batch, and what is only watched, in the order of the descriptors.
    enforced: list[tuple[Limit, str, int]]
    shadows: list[tuple[Limit, str, int]]
    # Most requests have one descriptor, with one rule that enforces: this one.
    single: Rule | None


@dataclass(frozen=True)
class Outcome:
    """What was decided for a plan, and counted."""

    is_allowed: bool
    items: list[tuple[Item, Decision | None]]
    """In the order of the descriptors; None where there was nothing to decide."""

    def headers(self) -> dict[str, str]:
        """RateLimit-Policy, RateLimit and Retry-After for the limits that were enforced; none without any."""
        enforced = [
            (item.rule, decision)
            for item, decision in self.items
            if item.rule is not None and decision is not None and not item.rule.is_shadow
        ]
        return _header_fields(enforced) if enforced else {}


NO_RULE: Final = Item(None, constant=status(Code.OK, b"", 0, 0))
UNLIMITED: Final = Item(None, constant=status(Code.OK, b"", UINT32_MAX, 0))


@dataclass(frozen=True)
class RuleStatistics:
    """One rule, as of now."""

    domain: str
    path: str
    is_shadow: bool
    allowed: int
    denied: int
    details: dict[str, tuple[int, int]]
    """(allowed, denied) by values, for rules that count them apart."""


@dataclass(frozen=True)
class ServiceStatistics:
    """As of now."""

    allowed: int
    denied: int
    descriptors_without_rule: int
    shadow_allowed: int
    shadow_denied: int
    """Verdicts of rules in shadow mode, also of rules that are gone."""
    rules: list[RuleStatistics]


class RateLimitService:
    """Decides requests with a limiter, by rules that may be replaced at any time."""

    def __init__(
        self, limiter: BatchLimiter, rules: RuleSet, *, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._limiter = limiter
        self._attempt_many = limiter.attempt_many
        self._now_ns = now_ns
        self._rules = rules
        self._inline: dict[tuple[str, int, int], Rule] = {}
        # By message: those of now, and those before.
        self._plans: dict[bytes, Plan] = {}
        self._older_plans: dict[bytes, Plan] = {}
        self._allowed = 0
        self._denied = 0
        self._without_rule = 0
        self._shadow_allowed = 0
        self._shadow_denied = 0

    def use(self, rules: RuleSet) -> None:
        """Decide by these rules from now on."""
        self._rules = rules
        self._plans = {}
        self._older_plans = {}

    def should_rate_limit(self, message: bytes) -> bytes | Awaitable[bytes]:
        """The response message; a coroutine when the limiter has to read first."""
        plan = self._plans.get(message) or self._plan(message)
        if plan.single is not None:
            now_ms = self._now_ns() // 1_000_000
            decisions = self._attempt_many(plan.enforced, now_ms)
            if decisions is None:
                return self._answer_single_later(plan, plan.single, now_ms)
            return self._answer_single(plan, plan.single, decisions[0])
        outcome = self.decide(plan)
        return _encode(outcome) if isinstance(outcome, Outcome) else _encode_later(outcome)

    # What is asked.

    def _plan(self, message: bytes) -> Plan:
        plan = self._older_plans.get(message)
        if plan is None:
            plan = self._make_plan(message)
            if len(message) > PLAN_MESSAGE_BYTES_MAX:
                return plan
        if len(self._plans) >= PLANS_MAX:
            self._older_plans, self._plans = self._plans, {}
        self._plans[message] = plan
        return plan

    def _make_plan(self, message: bytes) -> Plan:
        try:
            request = parse_request(message)
        except DecodeError as error:
            raise GrpcError(Status.INVALID_ARGUMENT, f"not a RateLimitRequest: {error}") from error
        if not 0 < len(request.domain) <= NAME_LENGTH_MAX:
            expected = f"expected 1 to {NAME_LENGTH_MAX}"
            raise GrpcError(
                Status.INVALID_ARGUMENT, f"domain: got {len(request.domain)} characters, {expected}"
            )
        if not request.descriptors:
            raise GrpcError(Status.INVALID_ARGUMENT, "descriptors: got none, expected at least one")
        return self.plan(request.domain, request.descriptors, request.hits_addend or 1)

    def plan(self, domain: str, descriptors: list[Descriptor], hits_addend: int) -> Plan:
        """What these descriptors ask for. Raises `GrpcError` when they cannot be right."""
        if len(descriptors) == 1:
            # Nothing that it could replace, and nothing to put in order: half the time of the general case.
            (descriptor,) = descriptors
            rule, identifier, _, values = self._applied(domain, descriptor)
            if rule is not None and rule.limit is not None and not rule.is_shadow:
                own = descriptor.hits_addend
                request = (rule.limit, identifier, hits_addend if own is None else own)
                return Plan([Item(rule, values)], [request], [], rule)
        applied = [self._applied(domain, descriptor) for descriptor in descriptors]
        replaced: set[str] = set()
        for one in applied:
            if one.rule is not None and one.rule.replaces:
                replaced |= one.rule.replaces
        items: list[Item] = []
        enforced: list[tuple[Limit, str, int]] = []
        shadows: list[tuple[Limit, str, int]] = []
        for one, descriptor in zip(applied, descriptors, strict=True):
            rule = one.rule
            if rule is None or (replaced and rule.name in replaced):
                items.append(NO_RULE)
            elif rule.limit is None:
                items.append(UNLIMITED)
            else:
                cost = hits_addend if descriptor.hits_addend is None else descriptor.hits_addend
                request = (rule.limit, one.identifier, cost)
                items.append(Item(rule, one.values))
                (shadows if rule.is_shadow else enforced).append(request)
        return Plan(items, enforced, shadows, items[0].rule if len(items) == len(enforced) == 1 else None)

    def _applied(self, domain: str, descriptor: Descriptor) -> Applied:
        inline = descriptor.limit
        if inline is None:
            return self._rules.match(domain, descriptor.entries)
        key = (domain, *inline)
        rule = self._inline.get(key)
        if rule is None:
            rule = inline_rule(domain, inline.requests_per_unit, inline.unit)
            if rule is None:
                text = f"limit.unit: got {inline.unit}, expected 1 (SECOND) to 7 (WEEK)"
                raise GrpcError(Status.INVALID_ARGUMENT, text)
            if len(self._inline) < INLINE_RULES_MAX:
                self._inline[key] = rule
        if not descriptor.entries:
            raise GrpcError(Status.INVALID_ARGUMENT, "entries: got none, a limit needs at least one")
        return Applied(rule, identifier_of(descriptor.entries, []), [], "")

    # Decisions.

    def _watch(self, plan: Plan, is_allowed: bool, now_ms: int) -> list[Decision | None]:
        """The verdicts of shadow rules, each alone; None where one has to be read first."""
        verdicts: list[Decision | None] = []
        for request in _watched(plan, is_allowed):
            verdict = self._attempt_many([request], now_ms)
            verdicts.append(None if verdict is None else verdict[0])
        return verdicts

    def decide(self, plan: Plan) -> Outcome | Awaitable[Outcome]:
        """Decide and count; a coroutine when the limiter has to read first."""
        now_ms = self._now_ns() // 1_000_000
        decisions = self._attempt_many(plan.enforced, now_ms) if plan.enforced else []
        if decisions is None:
            return self._decide_later(plan, now_ms)
        verdicts = self._watch(plan, all(decisions), now_ms)
        known = [verdict for verdict in verdicts if verdict is not None]
        if len(known) < len(verdicts):
            return self._watch_later(plan, decisions, verdicts, now_ms)
        return self._settle(plan, decisions, known)

    async def _decide_later(self, plan: Plan, now_ms: int) -> Outcome:
        requests = [Request(*request) for request in plan.enforced]
        decisions = await self._limiter.limit_many(requests, now_ms=now_ms)
        verdicts = self._watch(plan, all(decisions), now_ms)
        return await self._watch_later(plan, decisions, verdicts, now_ms)

    async def _watch_later(
        self, plan: Plan, decisions: list[Decision], verdicts: list[Decision | None], now_ms: int
    ) -> Outcome:
        known: list[Decision] = []
        for request, verdict in zip(_watched(plan, all(decisions)), verdicts, strict=True):
            if verdict is None:
                known += await self._limiter.limit_many([Request(*request)], now_ms=now_ms)
            else:
                known.append(verdict)
        return self._settle(plan, decisions, known)

    # Answers.

    def _answer_single(self, plan: Plan, rule: Rule, decision: Decision) -> bytes:
        """One descriptor, one rule that enforces: the same as `_encode`, in fewer steps."""
        if decision:
            self._allowed += 1
            if rule.detail is Detail.NONE:
                rule.allowed += 1
            else:
                rule.count(True, plan.items[0].values)
            remaining = decision.remaining
            reset_s = -((decision.decided_at_ms - decision.reset_at_ms) // 1000)
            value = b"%b;r=%d;t=%d" % (rule.policy_bytes, remaining, reset_s)
            return b"%b%b%b\x1a%b%b%b%b" % (
                OK_START,
                status(Code.OK, rule.current_limit, remaining, reset_s),
                rule.policy_field,
                varint(len(value) + RATELIMIT_FIELD_EXTRA + (len(value) > 127)),
                RATELIMIT_FIELD,
                varint(len(value)),
                value,
            )
        return _encode(self._settle(plan, [decision], []))

    async def _answer_single_later(self, plan: Plan, rule: Rule, now_ms: int) -> bytes:
        decisions = await self._limiter.limit_many([Request(*plan.enforced[0])], now_ms=now_ms)
        return self._answer_single(plan, rule, decisions[0])

    def _settle(self, plan: Plan, decisions: list[Decision], verdicts: list[Decision]) -> Outcome:
        """Count what was decided."""
        is_allowed = all(decisions)
        if is_allowed:
            self._allowed += 1
        else:
            self._denied += 1
        enforced, watched = iter(decisions), iter(verdicts)
        items: list[tuple[Item, Decision | None]] = []
        for item in plan.items:
            rule = item.rule
            if rule is None:
                self._without_rule += item is NO_RULE
                items.append((item, None))
                continue
            decision = next(watched if rule.is_shadow else enforced)
            if is_allowed or not rule.is_shadow:
                rule.count(bool(decision), item.values)
            if is_allowed and rule.is_shadow:
                self._shadow_allowed += bool(decision)
                self._shadow_denied += not decision
            items.append((item, decision))
        return Outcome(is_allowed, items)

    def statistics(self) -> ServiceStatistics:
        """Counters, as of now."""
        rules = [*self._rules.rules(), *((domain, rule) for (domain, _, _), rule in self._inline.items())]
        return ServiceStatistics(
            allowed=self._allowed,
            denied=self._denied,
            descriptors_without_rule=self._without_rule,
            shadow_allowed=self._shadow_allowed,
            shadow_denied=self._shadow_denied,
            rules=[
                RuleStatistics(
                    domain=domain,
                    path=rule.path,
                    is_shadow=rule.is_shadow,
                    allowed=rule.allowed,
                    denied=rule.denied,
                    details={values: (counts[0], counts[1]) for values, counts in rule.details.items()},
                )
                for domain, rule in rules
            ],
        )


def _encode(outcome: Outcome) -> bytes:
    """The response message."""
    parts = [response_start(Code.OK if outcome.is_allowed else Code.OVER_LIMIT)]
    for item, decision in outcome.items:
        rule = item.rule
        if rule is None or decision is None:
            parts.append(item.constant)
            continue
        reset_ms = decision.reset_at_ms - decision.decided_at_ms
        code = Code.OK if decision or rule.is_shadow else Code.OVER_LIMIT
        parts.append(status(code, rule.current_limit, decision.remaining, -(-reset_ms // 1000)))
    parts += [header_to_add(name.lower(), value) for name, value in outcome.headers().items()]
    return b"".join(parts)


async def _encode_later(outcome: Awaitable[Outcome]) -> bytes:
    return _encode(await outcome)


def _watched(plan: Plan, is_allowed: bool) -> list[tuple[Limit, str, int]]:
    """What is asked of shadow rules: a request that is denied consumes nothing."""
    if is_allowed:
        return plan.shadows
    return [(limit, identifier, 0) for limit, identifier, _ in plan.shadows]


def _header_fields(shown: list[tuple[Rule, Decision]]) -> dict[str, str]:
    """RateLimit-Policy, RateLimit and Retry-After for the limits that applied, tightest first if they are many.

    Retry-After is the longest wait of those that deny: coming back sooner would be denied again.
    """
    if len(shown) > POLICIES_SHOWN_MAX:
        shown = sorted(shown, key=lambda one: (one[1].allowed, one[1].remaining))[:POLICIES_SHOWN_MAX]
    states: list[str] = []
    waits: list[int | None] = []
    for rule, decision in shown:
        wait_ms: int | None = decision.reset_at_ms - decision.decided_at_ms
        if not decision:
            waits.append(decision.retry_after_ms)
            wait_ms = decision.retry_after_ms if decision.retry_after_ms is not None else wait_ms
        assert wait_ms is not None
        states.append(f"{rule.policy};r={min(decision.remaining, INTEGER_MAX)};t={whole_seconds(wait_ms)}")
    fields = {
        "RateLimit-Policy": ", ".join([rule.policy_value for rule, _ in shown]),
        "RateLimit": ", ".join(states),
    }
    possible = [wait_ms for wait_ms in waits if wait_ms is not None]
    if waits and len(possible) == len(waits):
        fields["Retry-After"] = str(whole_seconds(max(possible)))
    return fields
