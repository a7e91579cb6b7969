from __future__ import annotations

import asyncio

import pytest

from tests.runtime.world import clock, on_virtual_time
from tidegate import InvalidInput, Limit, LimitExceeded
from tidegate.testing.limiters import make_async_limiter

TWO_A_MINUTE = Limit("2/minute", namespace="tests")


@on_virtual_time
async def test_wait_sleeps_exactly_as_long_as_it_must() -> None:
    loop = asyncio.get_running_loop()
    limiter = make_async_limiter(clock=clock())
    assert await limiter.wait(TWO_A_MINUTE, "x", 2)
    assert loop.time() == 0.0
    retry_after_s = (await limiter.limit(TWO_A_MINUTE, "x")).retry_after
    assert await limiter.wait(TWO_A_MINUTE, "x", timeout=120)
    assert loop.time() == pytest.approx(retry_after_s, abs=1e-6)


@on_virtual_time
async def test_wait_gives_up_at_once_when_it_cannot_fit_in_time_or_ever() -> None:
    loop = asyncio.get_running_loop()
    limiter = make_async_limiter(clock=clock())
    await limiter.limit(TWO_A_MINUTE, "x", 2)
    for timeout in (0, 0.5, 1):
        denial = await limiter.wait(TWO_A_MINUTE, "x", timeout=timeout)
        assert not denial
        assert denial.retry_after is not None and denial.retry_after > timeout
    assert (await limiter.wait(TWO_A_MINUTE, "x", 3)).retry_after is None
    assert loop.time() == 0.0


@on_virtual_time
async def test_every_waiting_caller_is_served_in_the_end_and_the_limit_is_kept() -> None:
    loop = asyncio.get_running_loop()
    limiter = make_async_limiter(clock=clock())
    served_s: list[float] = []

    async def customer() -> None:
        assert await limiter.wait(TWO_A_MINUTE, "x")
        served_s.append(loop.time())

    await asyncio.gather(*(customer() for _ in range(12)))
    assert len(served_s) == 12
    served_s.sort()
    for first, third in zip(served_s, served_s[3:], strict=False):
        assert third - first >= 29.9, "four in half a minute cannot be two per minute"


@on_virtual_time
async def test_a_caller_that_stops_waiting_consumes_nothing() -> None:
    limiter = make_async_limiter(clock=clock())
    await limiter.limit(TWO_A_MINUTE, "x", 2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await limiter.wait(TWO_A_MINUTE, "x")
    assert (await limiter.peek(TWO_A_MINUTE, "x")).effective == 2


@on_virtual_time
async def test_the_decorator_may_wait() -> None:
    limiter = make_async_limiter(clock=clock())

    @limiter.limited(TWO_A_MINUTE, key=lambda: "x", cost=2, timeout=300)
    async def work() -> float:
        return asyncio.get_running_loop().time()

    assert await work() < await work()
    hasty = limiter.limited(TWO_A_MINUTE, key=lambda: "x", cost=2, timeout=0.001)(work)
    with pytest.raises(LimitExceeded):
        await hasty()


@pytest.mark.parametrize("timeout", [-1, True, "5", float("nan"), [1]])
@on_virtual_time
async def test_an_invalid_timeout_is_refused_before_anything_is_counted(timeout: float) -> None:
    limiter = make_async_limiter(clock=clock())
    with pytest.raises(InvalidInput, match="timeout"):
        await limiter.wait(TWO_A_MINUTE, "x", timeout=timeout)
    assert (await limiter.peek(TWO_A_MINUTE, "x")).effective == 0
