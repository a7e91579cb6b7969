"""The public interface as README shows it: what works after one `pip install`, without any server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.world import EPOCH_MS, HUNDRED_A_MINUTE
from tidegate import AsyncLimiter, Decision, Limit, Limiter, Request
from tidegate.errors import Closed
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_async_limiter, make_limiter

TWO_A_MINUTE = Limit("2/minute", namespace="tests")


class Driver:
    """One of the two drivers, called the same way: each test below runs for both."""

    def __init__(self, limiter: Limiter | AsyncLimiter) -> None:
        self.limiter = limiter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.limiter, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer

        return call


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(EPOCH_MS)


@pytest.fixture(params=["sync", "async"])
def driver(request: pytest.FixtureRequest, clock: ManualClock) -> Driver:
    return Driver(make_limiter(clock=clock) if request.param == "sync" else make_async_limiter(clock=clock))


def test_a_decision_says_all_that_a_caller_needs(driver: Driver) -> None:
    decision = driver.limit(HUNDRED_A_MINUTE, "user_123", cost=3)
    assert isinstance(decision, Decision)
    assert decision
    assert decision.allowed
    assert (decision.limit.quota, decision.effective, decision.remaining) == (100, 3, 97)
    assert decision.reset_at_ms == (EPOCH_MS // 60_000 + 1) * 60_000
    assert decision.reset_at == decision.reset_at_ms / 1000
    assert (decision.retry_after, decision.retry_after_ms) == (0.0, 0)
    assert decision.source == "local"
    assert decision.regional_age_ms is None
    assert decision.global_age_ms is None


def test_a_denial_is_falsy_counts_nothing_and_says_when_to_retry(driver: Driver, clock: ManualClock) -> None:
    driver.limit(TWO_A_MINUTE, "x", 2)
    denial = driver.limit(TWO_A_MINUTE, "x")
    assert not denial
    assert denial.remaining == 0
    assert denial.retry_after_ms > 0
    assert driver.peek(TWO_A_MINUTE, "x").effective == 2
    clock.advance(denial.retry_after_ms - 1)
    assert not driver.limit(TWO_A_MINUTE, "x")
    clock.advance(1)
    assert driver.limit(TWO_A_MINUTE, "x")


def test_a_cost_above_the_limit_never_fits(driver: Driver) -> None:
    denial = driver.limit(TWO_A_MINUTE, "x", 3)
    assert not denial
    assert denial.retry_after is None
    assert denial.retry_after_ms is None


def test_peek_checks_without_consuming(driver: Driver) -> None:
    driver.limit(TWO_A_MINUTE, "x")
    for _ in range(5):
        assert driver.peek(TWO_A_MINUTE, "x").remaining == 1


def test_the_request_may_have_its_own_time(driver: Driver) -> None:
    assert driver.limit(TWO_A_MINUTE, "x", 2, now_ms=EPOCH_MS + 3_600_000)
    assert driver.peek(TWO_A_MINUTE, "x").effective == 0, "what was counted an hour ahead does not count now"
    assert not driver.limit(TWO_A_MINUTE, "x", now_ms=EPOCH_MS + 3_600_000)
    assert driver.limit_many([Request(TWO_A_MINUTE, "x", 2)], now_ms=EPOCH_MS + 7_200_000)[0]
    assert not driver.peek(TWO_A_MINUTE, "x", now_ms=EPOCH_MS + 7_200_000).remaining


def test_a_batch_is_all_or_nothing(driver: Driver) -> None:
    decisions = driver.limit_many([Request(TWO_A_MINUTE, "a"), Request(TWO_A_MINUTE, "b", 3)])
    assert [bool(one) for one in decisions] == [True, False]
    assert decisions[0].remaining == 2, "what it had without consumption"
    assert driver.peek(TWO_A_MINUTE, "a").remaining == 2
    decisions = driver.limit_many((Request(TWO_A_MINUTE, "a"), Request(TWO_A_MINUTE, "b", 2)))
    assert all(decisions)
    assert driver.peek(TWO_A_MINUTE, "a").remaining == 1
    assert driver.peek(TWO_A_MINUTE, "b").remaining == 0
    assert driver.limit_many([]) == []


def test_namespaces_workspaces_and_durations_have_separate_counters_and_limits_do_not(driver: Driver) -> None:
    driver.limit(Limit("5/minute", namespace="a"), "x", 5)
    assert driver.limit(Limit("5/minute", namespace="b"), "x")
    assert driver.limit(Limit("5/minute", namespace="a", workspace="w"), "x")
    assert driver.limit(Limit("5/hour", namespace="a"), "x")
    assert not driver.limit(Limit("5/minute", namespace="a"), "x")
    assert driver.limit(Limit("6/minute", namespace="a"), "x")


def test_the_repr_of_an_embedded_limiter_names_kind_node_and_subjects(driver: Driver) -> None:
    driver.limit(TWO_A_MINUTE, "x")
    text = repr(driver.limiter)
    assert type(driver.limiter).__name__ in text
    assert "embedded" in text
    assert "1 subjects" in text
    assert driver.limiter.statistics().node_id in text
    assert driver.health() == []


def test_an_origin_in_memory_is_an_embedded_limiter() -> None:
    with Limiter(origin="memory://") as limiter:
        assert limiter.limit(TWO_A_MINUTE, "x")
        assert "embedded" in repr(limiter)


def test_start_and_stop_may_be_called_again_and_a_stopped_limiter_says_so(driver: Driver) -> None:
    driver.start()
    driver.start()
    driver.limit(TWO_A_MINUTE, "x")
    driver.stop()
    driver.stop()
    calls: list[Callable[[], Any]] = [
        lambda: driver.limit(TWO_A_MINUTE, "x"),
        lambda: driver.peek(TWO_A_MINUTE, "x"),
        lambda: driver.limit_many([Request(TWO_A_MINUTE, "x")]),
        lambda: driver.wait(TWO_A_MINUTE, "x", timeout=1),
        driver.start,
    ]
    for call in calls:
        with pytest.raises(Closed, match="stopped"):
            call()
    assert driver.statistics().allowed == 1


def test_context_managers_start_and_stop(clock: ManualClock) -> None:
    with make_limiter(clock=clock) as limiter:
        assert limiter.limit(TWO_A_MINUTE, "x")
    with pytest.raises(Closed):
        limiter.limit(TWO_A_MINUTE, "x")

    async def main() -> None:
        async with make_async_limiter(clock=clock) as limiter:
            assert await limiter.limit(TWO_A_MINUTE, "x")
        with pytest.raises(Closed):
            await limiter.limit(TWO_A_MINUTE, "x")
        assert limiter.limit_nowait(TWO_A_MINUTE, "x") is None

    asyncio.run(main())


async def test_without_a_network_no_decision_needs_an_await(clock: ManualClock) -> None:
    limiter = make_async_limiter(clock=clock)
    decision = limiter.limit_nowait(TWO_A_MINUTE, "x")
    assert decision is not None and decision.remaining == 1
    decisions = limiter.limit_many_nowait([Request(TWO_A_MINUTE, "x")])
    assert decisions is not None and decisions[0].remaining == 0


# -- wait


def test_wait_sleeps_exactly_as_long_as_it_must(clock: ManualClock) -> None:
    slept_s: list[float] = []

    def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        clock.advance(round(seconds * 1000))

    limiter = make_limiter(clock=clock, sleep=sleep)
    assert limiter.wait(TWO_A_MINUTE, "x", 2)
    assert slept_s == []
    expected_s = limiter.peek(TWO_A_MINUTE, "x").retry_after
    assert expected_s == 0.0, "nothing is asked for, nothing is waited for"
    retry_after_s = limiter.limit(TWO_A_MINUTE, "x").retry_after
    assert limiter.wait(TWO_A_MINUTE, "x", timeout=120)
    assert slept_s == [retry_after_s]


def test_wait_gives_up_at_once_when_it_cannot_fit_in_time_or_ever(clock: ManualClock) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(f"slept {seconds} s for nothing")

    limiter = make_limiter(clock=clock, sleep=sleep)
    limiter.limit(TWO_A_MINUTE, "x", 2)
    for timeout in (0, 0.5, 1):
        denial = limiter.wait(TWO_A_MINUTE, "x", timeout=timeout)
        assert not denial
        assert denial.retry_after is not None and denial.retry_after > timeout
    assert limiter.wait(TWO_A_MINUTE, "x", 3).retry_after is None
    assert limiter.wait(TWO_A_MINUTE, "x", 3, timeout=1000).retry_after is None
