from __future__ import annotations

import asyncio
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.credit_fleet import CreditFleet
from tests.runtime.world import on_virtual_time
from tidegate import InvalidInput, Limit, Limiter, Request
from tidegate.testing.limiters import make_async_limiter, make_limiter

NOON_MS = 4_102_444_800_000
TWO = Limit("2/minute", namespace="tests", shadow=True)
ENFORCED = Limit("3/minute", namespace="enforced")


def test_a_limit_in_shadow_mode_reports_and_denies_nothing() -> None:
    limiter = Limiter()
    decisions = [limiter.limit(TWO, "ann", now_ms=NOON_MS) for _ in range(4)]
    assert all(decisions) and all(decision.allowed for decision in decisions)
    assert [decision.exceeded for decision in decisions] == [False, False, True, True]
    assert [decision.remaining for decision in decisions] == [1, 0, 0, 0]
    assert "Retry-After" not in decisions[3].headers()
    assert repr(decisions[3]).startswith("Decision(exceeded")
    statistics = limiter.statistics()
    assert (statistics.allowed, statistics.denied, statistics.exceeded_in_shadow) == (4, 0, 2)


def test_shadow_is_part_of_a_limit() -> None:
    enforced = Limit("2/minute", namespace="tests")
    assert enforced != TWO and pickle.loads(pickle.dumps(TWO)) == TWO
    assert "shadow=True" in repr(TWO) and "shadow" not in repr(enforced)
    with pytest.raises(InvalidInput, match="shadow"):
        Limit("2/minute", namespace="tests", shadow="yes")  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40_000)), max_size=30))
def test_a_shadow_limit_exceeds_exactly_where_an_enforced_one_denies(requests: list[tuple[int, int]]) -> None:
    shadow, enforced = make_limiter(), make_limiter()
    rule = Limit("2/minute", namespace="tests")
    now_ms = NOON_MS
    for cost, pause_ms in requests:
        now_ms += pause_ms
        seen = shadow.limit(TWO, "x", cost, now_ms=now_ms)
        denied = enforced.limit(rule, "x", cost, now_ms=now_ms)
        assert seen.allowed
        assert (seen.exceeded, seen.remaining, seen.effective) == (
            not denied,
            denied.remaining,
            denied.effective,
        )


def test_a_shadow_limit_never_fails_a_batch() -> None:
    limiter = Limiter()
    batch = [Request(TWO, "ann", 2), Request(ENFORCED, "ann")]
    for number in range(3):
        shadow, enforced = limiter.limit_many(batch, now_ms=NOON_MS)
        assert shadow.allowed and enforced.allowed
        assert shadow.exceeded == (number > 0)
    shadow, enforced = limiter.limit_many(batch, now_ms=NOON_MS)
    assert shadow.allowed and not enforced.allowed


def test_a_batch_that_is_denied_counts_nothing_in_shadow_limits() -> None:
    limiter = Limiter()
    limiter.limit_many([Request(TWO, "ann"), Request(ENFORCED, "ann", 4)], now_ms=NOON_MS)
    assert limiter.peek(TWO, "ann", now_ms=NOON_MS).remaining == 2


def test_a_batch_with_a_wrong_item_counts_nothing() -> None:
    limiter = Limiter()
    with pytest.raises(InvalidInput):
        limiter.limit_many([Request(ENFORCED, "ann"), Request(TWO, "", 1)], now_ms=NOON_MS)
    assert limiter.peek(ENFORCED, "ann", now_ms=NOON_MS).remaining == 3


def test_tasks_decide_batches_with_shadow_limits_in_the_same_way() -> None:
    async def run() -> None:
        limiter = make_async_limiter()
        batch = [Request(TWO, "ann", 2), Request(ENFORCED, "ann")]
        assert limiter.limit_many_nowait(batch, now_ms=NOON_MS) is None
        outcomes = [
            [(each.allowed, each.exceeded) for each in await limiter.limit_many(batch, now_ms=NOON_MS)]
            for _ in range(4)
        ]
        assert outcomes == [
            [(True, False), (True, False)],
            [(True, True), (True, False)],
            [(True, True), (True, False)],
            [(True, False), (False, True)],
        ]

    asyncio.run(run())


def test_a_decorated_function_is_never_refused_by_a_shadow_limit() -> None:
    limiter = Limiter()
    calls = []
    limited = limiter.limited(TWO)(lambda: calls.append(1))
    for _ in range(5):
        limited()
    assert len(calls) == 5


@on_virtual_time
async def test_nodes_of_a_region_share_the_count_of_a_shadow_limit() -> None:
    fleet = CreditFleet(3)
    await fleet.start()
    rule = fleet.limit_of(5, shadow=True)
    decisions = []
    for number in range(9):
        decisions.append(await fleet.limiters[number % 3].limit(rule, "x"))
        await asyncio.sleep(0.05)
    assert all(decisions)
    assert [decision.exceeded for decision in decisions] == [False] * 5 + [True] * 4
    batch = [Request(rule, "x"), Request(fleet.limit_of(10), "y")]
    shadow, enforced = await fleet.limiters[0].limit_many(batch)
    assert (shadow.allowed, shadow.exceeded, enforced.allowed) == (True, True, True)
    await fleet.stop()
