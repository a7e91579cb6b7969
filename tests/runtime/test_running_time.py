"""A process that does not run for a while is not a Redis that does not answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import cast

import pytest

from tests.runtime.credit_fleet import CreditFleet
from tests.runtime.world import on_virtual_time, turns
from tidegate.adapters.running_time import RunningTimeout, result_within
from tidegate.sim.virtual_time import VirtualLoop


def stall(seconds: float) -> None:
    """This process does not run for this long: all its timers are late."""
    loop = cast("VirtualLoop", asyncio.get_running_loop())
    loop.advance_to(loop.time() + seconds)


@pytest.mark.parametrize("stall_s", [0.31, 1.0, 30.0])
@on_virtual_time
async def test_a_request_of_a_process_that_did_not_run_for_a_while_is_decided_by_the_origin(
    stall_s: float,
) -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    asked = asyncio.create_task(fleet.ask(0, 10))
    await turns(3)
    stall(stall_s)
    decision = await asked
    assert (decision.source, bool(decision)) == ("origin", True)
    assert not any(reason == "timeout" for _, reason in fleet.limiters[0].statistics().origin_errors)
    await fleet.stop()


@on_virtual_time
async def test_a_process_that_stalls_again_and_again_waits_no_longer_than_300_ms_of_its_own_time() -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    fleet.origins[0].latency_s = (3_600.0, 3_600.0)
    asked = asyncio.create_task(fleet.ask(0, 10))
    ran_s = 0.0
    stalls = 0
    while not asked.done():
        stall(0.2)
        stalls += 1
        await asyncio.sleep(0.02)
        ran_s += 0.02
    assert (await asked).source == "degraded"
    assert stalls >= 3
    assert ran_s <= 0.301
    fleet.crash(0)


@on_virtual_time
async def test_a_process_whose_every_turn_is_late_waits_no_longer_than_300_ms_of_its_own_time() -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    fleet.origins[0].latency_s = (3_600.0, 3_600.0)
    asked = asyncio.create_task(fleet.ask(0, 10))
    turns_run = 0
    while not asked.done():
        stall(0.03)
        await asyncio.sleep(0)
        turns_run += 1
        assert turns_run < 100
    assert (await asked).source == "degraded"
    fleet.crash(0)


@on_virtual_time
async def test_without_a_stall_a_request_waits_300_ms() -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    fleet.origins[0].latency_s = (3_600.0, 3_600.0)
    began_s = asyncio.get_running_loop().time()
    assert (await fleet.ask(0, 10)).source == "degraded"
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(0.3)
    fleet.crash(0)


@on_virtual_time
async def test_a_timeout_leaves_the_time_that_was_left_before_the_stall() -> None:
    loop = asyncio.get_running_loop()

    async def wait_in_vain() -> None:
        async with RunningTimeout(0.3):
            await asyncio.sleep(0.1)
            stall(5.0)
            await loop.create_future()

    began_s = loop.time()
    with pytest.raises(TimeoutError):
        await wait_in_vain()
    # How much of a step had passed when the stall began is known only to the precision of a step.
    assert 5.249 <= loop.time() - began_s <= 5.301


class Waited(Future[int]):
    """A future of another thread; the thread that waits for it stalls as often as `stalls` says."""

    def __init__(self, answers_at_s: float, stalls: list[float]) -> None:
        super().__init__()
        self._now_s = 0.0
        self._answers_at_s = answers_at_s
        self._stalls = stalls

    def now_s(self) -> float:
        return self._now_s

    def result(self, timeout: float | None = None) -> int:
        assert timeout is not None
        if self._now_s + timeout >= self._answers_at_s:
            return 7
        self._now_s += timeout + (self._stalls.pop(0) if self._stalls else 0.0)
        raise TimeoutError


def test_a_thread_that_did_not_run_gets_the_answer_that_came_meanwhile() -> None:
    future = Waited(0.29, [])
    with pytest.raises(TimeoutError):
        result_within(future, 0.28, future.now_s)
    # In each of five steps of 50 ms, and in the last one of 30 ms, after which there is one more.
    for steps, answers_at_s in enumerate((5.27, 5.27, 5.27, 5.27, 5.27, 5.32)):
        stalled = Waited(answers_at_s, [0.0] * steps + [5.0])
        assert result_within(stalled, 0.28, stalled.now_s) == 7


def test_a_thread_waits_no_longer_than_its_own_time() -> None:
    future = Waited(float("inf"), [0.2] * 100)
    with pytest.raises(TimeoutError):
        result_within(future, 0.33, future.now_s)
    assert future.now_s() <= 0.33 + 0.05 + 8 * 0.2
