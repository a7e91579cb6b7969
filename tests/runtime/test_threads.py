"""Many threads and many tasks at once: the limit is never exceeded and no accepted unit is lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.world import EPOCH_MS, MILLION_AN_HOUR
from tidegate import Decision, Limit, Limiter, Request
from tidegate.adapters.memory import MemoryOrigin
from tidegate.errors import Closed
from tidegate.testing.clock import ManualClock
from tidegate.testing.faults import FailingOrigin, TrackingOrigin
from tidegate.testing.limiters import make_async_limiter, make_limiter

THREADS = 8
ROUNDS = 400
HALF = Limit(THREADS * ROUNDS // 2, duration_ms=3_600_000, namespace="tests")


def hammer(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Run `work(number)` in `threads` threads at the same moment. Returns their results, or raises the first
    failure."""
    barrier = threading.Barrier(threads)
    results: list[Any] = [None] * threads
    failures: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait(30)
        try:
            results[number] = work(number)
        except BaseException as error:  # noqa: BLE001  # passed on to the test, whatever it is
            failures.append(error)

    crowd = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(120)
    if failures:
        raise failures[0]
    return results


@pytest.mark.parametrize("shared", [False, True], ids=["embedded", "origin"])
def test_threads_on_one_subject_never_exceed_the_limit_and_lose_nothing(shared: bool) -> None:
    clock = ManualClock(EPOCH_MS)
    store = MemoryOrigin(clock=clock)
    limiter = (
        make_limiter(region="fra", origin=store.another(), clock=clock)
        if shared
        else make_limiter(clock=clock)
    )

    def work(number: int) -> int:
        return sum(bool(limiter.limit(HALF, "x")) for _ in range(ROUNDS))

    accepted = sum(hammer(work))
    assert accepted == HALF.quota
    assert limiter.peek(HALF, "x").effective == HALF.quota
    statistics = limiter.statistics()
    assert (statistics.allowed - 1, statistics.denied) == (accepted, THREADS * ROUNDS - accepted)
    limiter.stop()
    if shared:
        with make_limiter(region="fra", origin=store.another(), clock=clock) as other:
            assert other.peek(HALF, "x").effective == accepted


def test_threads_of_three_nodes_on_many_subjects_agree_in_the_end() -> None:
    clock = ManualClock(EPOCH_MS)
    store = MemoryOrigin(clock=clock)
    nodes = [make_limiter(region="fra", origin=store.another(), clock=clock) for _ in range(3)]

    def work(number: int) -> Counter[str]:
        accepted: Counter[str] = Counter()
        for turn in range(ROUNDS):
            name = f"user {turn % 17}"
            cost = turn % 3 + 1
            if nodes[number % 3].limit(MILLION_AN_HOUR, name, cost):
                accepted[name] += cost
        return accepted

    total: Counter[str] = sum(hammer(work), Counter())
    for node in nodes:
        node.stop()
    with make_limiter(region="fra", origin=store.another(), clock=clock) as auditor:
        for name, count in total.items():
            assert auditor.peek(MILLION_AN_HOUR, name).effective == count


def test_batches_of_many_threads_are_all_or_nothing() -> None:
    limit = Limit(ROUNDS, duration_ms=3_600_000, namespace="tests")
    limiter = make_limiter(clock=ManualClock(EPOCH_MS))

    def work(number: int) -> int:
        names = ("a", "b") if number % 2 else ("b", "a")
        batch = [Request(limit, name) for name in names]
        return sum(all(limiter.limit_many(batch)) for _ in range(ROUNDS))

    accepted = sum(hammer(work))
    assert accepted == ROUNDS
    assert limiter.peek(limit, "a").effective == limiter.peek(limit, "b").effective == ROUNDS


def test_threads_that_arrive_together_start_the_limiter_once() -> None:
    origin = TrackingOrigin(MemoryOrigin())
    limiter = Limiter(region="fra", origin=origin)
    hammer(lambda number: limiter.limit(MILLION_AN_HOUR, f"user {number}"))
    assert origin.count("open") == 1
    limiter.stop()


def test_a_stop_in_the_middle_of_traffic_ends_every_thread_with_closed_and_loses_nothing_that_was_allowed() -> (
    None
):
    clock = ManualClock(EPOCH_MS)
    store = MemoryOrigin(clock=clock)
    accepted: Counter[str] = Counter()
    for life in range(15):
        limiter = make_limiter(region="fra", origin=store.another(), clock=clock)
        limiter.start()
        begun = threading.Barrier(THREADS)

        def work(
            number: int, life: int = life, limiter: Limiter = limiter, begun: threading.Barrier = begun
        ) -> Counter[str]:
            allowed: Counter[str] = Counter()
            begun.wait(30)
            if number == 0:
                limiter.stop()
                return allowed
            turn = 0
            while True:
                turn += 1
                # Every other one is cold: many are in the middle of a read when the stop comes.
                name = f"{life} {number} {turn}" if turn % 2 else "warm"
                try:
                    if turn % 3:
                        passed = bool(limiter.limit(MILLION_AN_HOUR, name))
                    else:
                        passed = all(limiter.limit_many([Request(MILLION_AN_HOUR, name)]))
                except Closed:
                    return allowed
                allowed[name] += passed

        for allowed in hammer(work):
            accepted += allowed
    with make_limiter(region="fra", origin=store.another(), clock=clock) as auditor:
        found = {name: auditor.peek(MILLION_AN_HOUR, name).effective for name in accepted}
    assert found == dict(accepted)


async def test_many_tasks_on_one_subject_never_exceed_the_limit_and_lose_nothing() -> None:
    clock = ManualClock(EPOCH_MS)
    store = MemoryOrigin(clock=clock)
    nodes = [make_async_limiter(region="fra", origin=store.another(), clock=clock) for _ in range(2)]

    async def customer(number: int) -> int:
        accepted = 0
        for _ in range(20):
            accepted += bool(await nodes[number % 2].limit(MILLION_AN_HOUR, "x"))
            await asyncio.sleep(0)
        return accepted

    accepted = sum(await asyncio.gather(*(customer(number) for number in range(100))))
    assert accepted == 2_000
    for node in nodes:
        await node.stop()
    async with make_async_limiter(region="fra", origin=store.another(), clock=clock) as auditor:
        assert (await auditor.peek(MILLION_AN_HOUR, "x")).effective == 2_000


async def test_tasks_that_wait_for_a_read_when_the_limiter_stops_are_refused_or_counted() -> None:
    clock = ManualClock(EPOCH_MS)
    store = MemoryOrigin(clock=clock)
    origin = FailingOrigin(store.another())
    limiter = make_async_limiter(region="fra", origin=origin, clock=clock)
    await limiter.start()
    origin.faults.hang("read")
    customers = [asyncio.ensure_future(limiter.limit(MILLION_AN_HOUR, "x")) for _ in range(10)]
    await asyncio.sleep(0)
    await limiter.stop()
    answers = await asyncio.gather(*customers, return_exceptions=True)
    allowed = sum(isinstance(one, Decision) and one.allowed for one in answers)
    assert allowed + sum(isinstance(one, Closed) for one in answers) == 10
    async with make_async_limiter(region="fra", origin=store.another(), clock=clock) as auditor:
        assert (await auditor.peek(MILLION_AN_HOUR, "x")).effective == allowed


@pytest.mark.parametrize("shared", [False, True], ids=["embedded", "origin"])
def test_a_limit_function_that_was_kept_is_closed_too(shared: bool) -> None:
    limiter = Limiter(region="fra", origin=MemoryOrigin()) if shared else Limiter()
    limiter.start()
    kept = limiter.limit
    assert kept(MILLION_AN_HOUR, "x")
    limiter.stop()
    with pytest.raises(Closed):
        kept(MILLION_AN_HOUR, "x")
