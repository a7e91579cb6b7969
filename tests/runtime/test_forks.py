"""A limiter made before a fork works in every child: a new node with connections of its own."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.world import EPOCH_MS, MILLION_AN_HOUR
from tidegate import AsyncLimiter, ConfigurationError, Limit, Limiter, Tuning
from tidegate.adapters.memory import MemoryOrigin
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_async_limiter, make_limiter

# Python 3.12 warns of forks in a process with threads, which is what is tested here.
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork here: forking servers are not checked"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]

TEN_AN_HOUR = Limit("10/hour", namespace="tests")
# A busy machine may take longer to open a file than a request usually waits.
PATIENT = Tuning(read_timeout_ms=10_000, replay_timeout_ms=10_000, flush_timeout_ms=20_000)


def in_child(work: Callable[[], Any]) -> Any:
    """Fork, run `work` in the child, and return what it returned. A child that hangs is killed by an alarm."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            import signal

            os.close(reading)
            signal.alarm(30)
            answer = json.dumps(work()).encode()
            os.write(writing, answer)
            code = 0
        except BaseException:  # noqa: BLE001  # the child must not return into the parent's test run
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {status}"
    return json.loads(answer)


def test_an_embedded_limiter_continues_in_the_child_with_its_counts() -> None:
    limiter = make_limiter(clock=ManualClock(EPOCH_MS))
    limiter.limit(TEN_AN_HOUR, "x", 4)
    assert in_child(lambda: limiter.limit(TEN_AN_HOUR, "x", 2).remaining) == 4
    assert limiter.limit(TEN_AN_HOUR, "x").remaining == 5, "the parent does not see what the child did"


def test_an_embedded_async_limiter_continues_in_the_child() -> None:
    limiter = make_async_limiter(clock=ManualClock(EPOCH_MS))

    def work() -> int:
        return asyncio.run(limiter.limit(TEN_AN_HOUR, "x", 2)).remaining

    assert in_child(work) == 8


def test_a_decision_that_another_thread_is_making_neither_deadlocks_nor_corrupts_the_child() -> None:
    limiter = Limiter()
    many = Limit(10**9, duration_ms=3_600_000, namespace="tests")
    stop = threading.Event()

    def hammer() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            limiter.limit(many, f"user {n % 5000}")

    threads = [threading.Thread(target=hammer) for _ in range(3)]
    for thread in threads:
        thread.start()

    def work() -> list[bool]:
        found = [bool(limiter.limit(many, f"user {n}")) for n in range(5000)]
        assert limiter.statistics().subjects >= 5000
        return [all(found)]

    try:
        for _ in range(8):
            assert in_child(work) == [True]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_lock_that_is_held_for_ever_does_not_hang_the_fork_or_the_child() -> None:
    limiter = Limiter()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with limiter._lock:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        assert in_child(lambda: bool(limiter.limit(TEN_AN_HOUR, "x")))
    finally:
        release.set()
        thread.join()
    assert limiter.limit(TEN_AN_HOUR, "x")


def test_a_child_of_a_node_is_a_node_of_its_own_and_its_counts_arrive(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/counts.db"
    limiter = Limiter(region="fra", origin=url, tuning=PATIENT)
    limiter.limit(MILLION_AN_HOUR, "x", 5)
    parent_id = limiter.statistics().node_id

    def work() -> list[Any]:
        seen = limiter.limit(MILLION_AN_HOUR, "x", 3)
        again = limiter.limit_many([])
        node_id = limiter.statistics().node_id
        limiter.stop()
        return [seen.effective, seen.source, node_id, again]

    limiter.stop()
    limiter = Limiter(region="fra", origin=url, tuning=PATIENT)
    limiter.limit(MILLION_AN_HOUR, "x", 1)
    effective, source, node_id, _ = in_child(work)
    assert source == "origin"
    assert effective >= 8, "at least five of the parent, and its own"
    assert node_id not in (parent_id, limiter.statistics().node_id)
    limiter.limit(MILLION_AN_HOUR, "x", 2)
    limiter.stop()
    with Limiter(region="fra", origin=url, tuning=PATIENT) as auditor:
        assert auditor.peek(MILLION_AN_HOUR, "x").effective == 5 + 1 + 3 + 2


def test_a_node_that_was_started_on_an_event_loop_starts_again_in_the_child(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/counts.db"

    async def parent() -> tuple[Any, str, int]:
        async with AsyncLimiter(region="fra", origin=url, tuning=PATIENT) as limiter:
            await limiter.limit(MILLION_AN_HOUR, "x", 5)

            def work() -> list[Any]:
                nowait = limiter.limit_nowait(MILLION_AN_HOUR, "x")
                found: list[Any] = []

                def run() -> None:
                    # The child is still inside the parent's loop, so its own runs in a thread.
                    async def child() -> None:
                        decision = await limiter.limit(MILLION_AN_HOUR, "x", 3)
                        found.append(decision.source)
                        await limiter.stop()

                    asyncio.run(child())

                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
                return [nowait is None, *found, limiter.statistics().node_id]

            answer = in_child(work)
            node_id = limiter.statistics().node_id
            await limiter.limit(MILLION_AN_HOUR, "x", 2)
        async with AsyncLimiter(region="fra", origin=url, tuning=PATIENT) as auditor:
            total = (await auditor.peek(MILLION_AN_HOUR, "x")).effective
        return answer, node_id, total

    (needs_start, source, child_id), parent_id, total = asyncio.run(parent())
    assert needs_start
    assert source == "origin"
    assert child_id != parent_id
    assert total == 10


def test_a_child_that_never_used_its_limiter_may_stop_it(tmp_path: Path) -> None:
    limiter = Limiter(region="fra", origin=f"sqlite:///{tmp_path}/counts.db")
    limiter.limit(MILLION_AN_HOUR, "x", 5)

    def work() -> bool:
        limiter.stop()
        return True

    assert in_child(work)
    assert limiter.limit(MILLION_AN_HOUR, "x", 2)
    limiter.stop()


def test_a_limiter_with_an_adapter_object_cannot_be_forked_and_says_what_to_do() -> None:
    limiter = Limiter(region="fra", origin=MemoryOrigin())
    limiter.limit(MILLION_AN_HOUR, "x")

    def work() -> str:
        try:
            limiter.limit(MILLION_AN_HOUR, "x")
        except ConfigurationError as error:
            return str(error)
        return "no error"

    assert "give it a URL instead" in in_child(work)
    limiter.stop()
