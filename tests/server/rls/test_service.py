from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.rls.asking import OK, OVER_LIMIT, RULES, Response, one, parsed, request
from tidegate import AsyncLimiter
from tidegate.core.model import Decision, Limit, Request
from tidegate.server.http2.grpc import GrpcError, Status
from tidegate.server.rls.messages import UINT32_MAX
from tidegate.server.rls.rules import WORKSPACE
from tidegate.server.rls.rules_file import parse_rules
from tidegate.server.rls.service import PLANS_MAX, RateLimitService

START_MS = 1_800_000_000_000
YEAR_MS = 365 * 86_400_000


class Asked:
    """A service with an embedded limiter and a clock of its own."""

    def __init__(self, text: bytes = RULES) -> None:
        self.now_ms = START_MS
        self.limiter = AsyncLimiter()
        self.service = RateLimitService(
            self.limiter, parse_rules([("rules.yaml", text)]), now_ns=lambda: self.now_ms * 1_000_000
        )

    def ask(self, *descriptors: Any, domain: str = "edge", hits: int = 0) -> Response:
        data = request(*descriptors, domain=domain, hits=hits).SerializeToString()
        answer = self.service.should_rate_limit(data)
        assert isinstance(answer, bytes)
        return parsed(answer)

    def counts(self) -> dict[str, tuple[int, int]]:
        return {rule.path: (rule.allowed, rule.denied) for rule in self.service.statistics().rules}


USER = [("user", "u1")]
GOLD = [("tier", "gold")]
NEW = [("new", "n1")]


def test_a_limit_is_enforced_and_reported() -> None:
    asked = Asked()
    for remaining in (4, 3, 2, 1, 0):
        answer = asked.ask(one(USER))
        assert answer.code == OK
        (status,) = answer.statuses
        assert status[:4] == (OK, 5, 6, remaining)
        reset_s = -(-(YEAR_MS - START_MS % YEAR_MS) // 1000)
        assert status.reset_s == reset_s
        assert answer.headers == {
            "ratelimit-policy": '"user";q=5;w=31536000',
            "ratelimit": f'"user";r={remaining};t={reset_s}',
        }
    answer = asked.ask(one(USER))
    assert answer.code == OVER_LIMIT
    assert answer.statuses[0][:4] == (OVER_LIMIT, 5, 6, 0)
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["ratelimit"] == f'"user";r=0;t={answer.headers["retry-after"]}'
    assert asked.counts()["user"] == (5, 1)
    statistics = asked.service.statistics()
    assert (statistics.allowed, statistics.denied) == (5, 1)


def test_there_is_one_status_per_descriptor_in_their_order() -> None:
    answer = Asked().ask(one(GOLD), one([("nothing", "x")]), one(USER), one([("free", "x")]), one(NEW))
    assert [(status.code, status.quota, status.remaining) for status in answer.statuses] == [
        (OK, 50, 49),
        (OK, None, 0),
        (OK, 5, 4),
        (OK, None, UINT32_MAX),
        (OK, 2, 1),
    ]
    assert answer.headers["ratelimit-policy"] == '"golden";q=50;w=31536000, "user";q=5;w=31536000'


def test_a_request_denied_by_one_rule_consumes_nothing_from_the_others() -> None:
    asked = Asked()
    for _ in range(3):
        answer = asked.ask(one(USER), one([("blocked", "x")]))
        assert answer.code == OVER_LIMIT
        assert [status.code for status in answer.statuses] == [OK, OVER_LIMIT]
        assert answer.statuses[0].remaining == 5
        assert "retry-after" not in answer.headers, "it never fits"
    assert asked.ask(one(USER)).statuses[0].remaining == 4


def test_no_rule_means_ok() -> None:
    asked = Asked()
    for descriptor, domain in ((one([("nothing", "x")]), "edge"), (one(USER), "other"), (one([]), "edge")):
        answer = asked.ask(descriptor, domain=domain)
        assert (answer.code, answer.headers) == (OK, {})
    assert asked.service.statistics().descriptors_without_rule == 3


def test_hits_addend_of_the_request_and_of_a_descriptor_are_the_cost() -> None:
    asked = Asked()
    assert asked.ask(one(USER), hits=3).statuses[0].remaining == 2
    assert asked.ask(one(USER, hits=1), hits=100).statuses[0].remaining == 1
    assert asked.ask(one(USER, hits=2)).code == OVER_LIMIT
    assert asked.ask(one(USER, hits=2**64 - 1)).code == OVER_LIMIT
    assert asked.ask(one(USER), hits=2**32 - 1).code == OVER_LIMIT


def test_an_explicit_zero_checks_without_consuming() -> None:
    asked = Asked()
    asked.ask(one(USER), hits=4)
    for _ in range(10):
        assert asked.ask(one(USER, hits=0)).statuses[0][:4] == (OK, 5, 6, 1)
    asked.ask(one(USER))
    assert asked.ask(one(USER, hits=0)).statuses[0][:4] == (OK, 5, 6, 0)
    assert asked.ask(one(USER)).code == OVER_LIMIT


def test_a_limit_in_the_request_goes_before_the_rules() -> None:
    asked = Asked()
    assert asked.ask(one(USER, limit=(2, 3))).statuses[0][:4] == (OK, 2, 3, 1)
    assert asked.ask(one(USER, limit=(2, 3))).statuses[0][:4] == (OK, 2, 3, 0)
    assert asked.ask(one(USER, limit=(2, 3))).code == OVER_LIMIT
    assert asked.ask(one(USER)).statuses[0].remaining == 4
    assert asked.ask(one([("any", "x")], limit=(9, 7)), domain="unknown").statuses[0][:4] == (OK, 9, 7, 8)
    assert asked.counts()["inline"] == (1, 0)


def test_a_rule_replaces_another_that_the_same_request_meets() -> None:
    asked = Asked()
    vip = [("vip", "v")]
    answer = asked.ask(one(GOLD), one(vip))
    assert [status.quota for status in answer.statuses] == [None, 100]
    assert asked.ask(one(GOLD)).statuses[0].remaining == 49


def test_shadow_rules_count_and_report_but_never_deny() -> None:
    asked = Asked()
    remaining = [asked.ask(one(NEW)).statuses[0] for _ in range(4)]
    assert [(status.code, status.remaining) for status in remaining] == [(OK, 1), (OK, 0), (OK, 0), (OK, 0)]
    assert asked.counts()["new"] == (2, 2)
    assert asked.ask(one(NEW)).headers == {}, "a limit that is not enforced is not shown to clients"


def test_shadow_rules_do_not_keep_others_from_counting_and_others_do_not_count_in_them_when_they_deny() -> (
    None
):
    asked = Asked()
    for remaining in (4, 3, 2, 1, 0):
        answer = asked.ask(one(NEW), one(USER))
        assert answer.code == OK
        assert answer.statuses[1].remaining == remaining
    other = [("new", "n2")]
    assert asked.ask(one(other), one(USER)).code == OVER_LIMIT
    assert asked.ask(one(other, hits=0)).statuses[0].remaining == 2, "a denied request consumes nothing"


def test_a_rule_of_zero_blocks() -> None:
    assert Asked().ask(one([("blocked", "x")])).code == OVER_LIMIT


def test_detailed_metrics_count_values_separately_and_are_bounded() -> None:
    asked = Asked()
    for _ in range(3):
        asked.ask(one([("path", "/a")]))
    for number in range(2_000):
        asked.ask(one([("path", str(number))]))
    (rule,) = [rule for rule in asked.service.statistics().rules if rule.path == "path"]
    assert rule.details["path=/a"] == (2, 1)
    assert rule.details["other"] == (2_000 - 999, 0)
    assert (rule.allowed, rule.denied) == (2_002, 1)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (request(one(USER), domain="").SerializeToString(), "domain: got 0 characters"),
        (
            request(one(USER, limit=(1, 1)), domain="d" * 513).SerializeToString(),
            "domain: got 513 characters",
        ),
        (request().SerializeToString(), "descriptors: got none"),
        (request(one(USER, limit=(1, 0))).SerializeToString(), "limit.unit: got 0"),
        (request(one(USER, limit=(1, 8))).SerializeToString(), "limit.unit: got 8"),
        (request(one([], limit=(1, 1))).SerializeToString(), "entries: got none"),
        (b"\xff\xff", "not a RateLimitRequest"),
    ],
)
def test_an_invalid_request_fails_with_invalid_argument(data: bytes, text: str) -> None:
    asked = Asked()
    for _ in range(2):
        with pytest.raises(GrpcError) as error:
            asked.service.should_rate_limit(data)
        assert error.value.status == Status.INVALID_ARGUMENT
        assert text in error.value.message
    assert (asked.service.statistics().allowed, asked.service.statistics().denied) == (0, 0)


def test_new_rules_apply_at_once_and_counters_are_kept() -> None:
    asked = Asked()
    asked.ask(one(USER), hits=3)
    rules = parse_rules([("rules.yaml", RULES.replace(b"requests_per_unit: 5}", b"requests_per_unit: 10}"))])
    asked.service.use(rules)
    assert asked.ask(one(USER)).statuses[0][:4] == (OK, 10, 6, 6)


def test_plans_are_remembered_within_their_bound() -> None:
    asked = Asked()
    for number in range(PLANS_MAX + 10):
        asked.ask(one([("free", str(number))]))
    assert len(asked.service._plans) == 10
    assert len(asked.service._older_plans) == PLANS_MAX
    big = one([("free", "x" * 2_000)])
    before = len(asked.service._plans)
    assert asked.ask(big).code == OK
    assert len(asked.service._plans) == before


class ColdLimiter:
    """An embedded limiter that has to read before the first decision on an identifier."""

    def __init__(self, cold: set[str]) -> None:
        self._limiter = AsyncLimiter()
        self._cold = cold

    def attempt_many(self, requests: list[tuple[Limit, str, int]], now_ms: int) -> list[Decision] | None:
        if self._cold & {identifier for _, identifier, _ in requests}:
            return None
        return self._limiter.attempt_many(requests, now_ms)

    async def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        await asyncio.sleep(0)
        assert all(isinstance(item, Request) for item in requests)
        self._cold -= {item.identifier for item in requests}
        return await self._limiter.limit_many(requests, now_ms=now_ms)


@pytest.mark.parametrize(
    "cold", [set(), {"user=u1"}, {"new=n1"}, {"user=u1", "new=n1"}, {"new=n1", "tier=gold"}]
)
async def test_cold_and_warm_decisions_say_and_count_the_same(cold: set[str]) -> None:
    rules = parse_rules([("rules.yaml", RULES)])
    service = RateLimitService(ColdLimiter(cold), rules, now_ns=lambda: START_MS * 1_000_000)
    data = request(one(NEW), one(USER), one(GOLD)).SerializeToString()
    found = []
    for _ in range(7):
        answer = service.should_rate_limit(data)
        found.append(parsed(answer if isinstance(answer, bytes) else await answer))
    assert [answer.code for answer in found] == [OK] * 5 + [OVER_LIMIT] * 2
    assert [answer.statuses[0].remaining for answer in found] == [1, 0, 0, 0, 0, 0, 0]
    assert [answer.statuses[1].remaining for answer in found] == [4, 3, 2, 1, 0, 0, 0]
    counts = {rule.path: (rule.allowed, rule.denied) for rule in service.statistics().rules}
    assert counts["new"] == (2, 3)
    assert counts["user"] == (5, 2)


entries = st.sampled_from(
    [USER, [("user", "u2")], GOLD, [("tier", "tin")], [("tenant", "t"), ("op", "o")], [("x", "y")]]
)
asks = st.lists(
    st.tuples(st.lists(st.tuples(entries, st.none() | st.integers(0, 4)), min_size=1, max_size=4)),
    max_size=25,
)


@given(asks)
def test_any_sequence_of_requests_is_all_or_nothing(
    sequence: list[tuple[list[tuple[Any, int | None]]]],
) -> None:
    """Against a plain model: a counter per descriptor, and one rule for all."""
    quotas = {"user=u1": 5, "user=u2": 5, "tier=gold": 50, "tier=tin": 3, "tenant=t&op=o": 4}
    used: dict[str, int] = dict.fromkeys(quotas, 0)
    asked = Asked()
    for (items,) in sequence:
        answer = asked.ask(*[one(which, hits) for which, hits in items])
        after = dict(used)
        for which, hits in items:
            name = "&".join(f"{key}={value}" for key, value in which)
            if name in after:
                after[name] += 1 if hits is None else hits
        is_allowed = all(after[name] <= quota for name, quota in quotas.items())
        assert (answer.code == OK) == is_allowed
        used = after if is_allowed else used
    for name, quota in quotas.items():
        which = [tuple(part.split("=")) for part in name.split("&")]
        assert asked.ask(one(which, 0)).statuses[0].remaining == quota - used[name]


def test_counters_are_those_of_the_library() -> None:
    asked = Asked()
    asked.ask(one(USER), hits=2)
    limit = Limit(5, duration_ms=YEAR_MS, namespace="edge", workspace=WORKSPACE)
    decision = asked.limiter.limit_nowait(limit, "user=u1", 0, now_ms=START_MS)
    assert decision is not None
    assert decision.remaining == 3
