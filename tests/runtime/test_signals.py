"""A signal handler that asks for a decision in the middle of another one is refused or served, never miscounted."""

from __future__ import annotations

import gc
import signal
import threading

import pytest

from tests.runtime.world import EPOCH_MS
from tidegate import Limit
from tidegate.errors import ReentrantCall
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_async_limiter, make_limiter

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="no setitimer here: signals are not checked"
)

MANY = Limit(10**9, duration_ms=3_600_000, namespace="tests")


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_a_handler_that_calls_in_the_middle_of_a_decision_is_never_counted_wrong(kind: str) -> None:
    clock = ManualClock(EPOCH_MS)
    limiter = make_limiter(clock=clock)
    tasks = make_async_limiter(clock=clock)
    outcomes = {"served": 0, "refused": 0}

    def decide() -> bool:
        if kind == "threads":
            return bool(limiter.limit(MANY, "x"))
        return bool(tasks.limit_nowait(MANY, "x"))

    def handler(_signal: int, _frame: object) -> None:
        try:
            decide()
            outcomes["served"] += 1
        except ReentrantCall:
            outcomes["refused"] += 1

    before = signal.signal(signal.SIGALRM, handler)
    accepted = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        while outcomes["served"] + outcomes["refused"] < 2_000:
            accepted += decide()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    statistics = (limiter if kind == "threads" else tasks).statistics()
    assert statistics.allowed == accepted + outcomes["served"]
    effective = limiter.peek(MANY, "x").effective if kind == "threads" else tasks.limit_nowait(MANY, "x", 0)
    seen = effective if isinstance(effective, int) else effective.effective if effective else None
    assert seen == accepted + outcomes["served"]


def test_a_refused_handler_leaves_the_lock_to_the_others() -> None:
    limiter = make_limiter(clock=ManualClock(EPOCH_MS))
    with limiter._gate:
        with pytest.raises(ReentrantCall, match="signal handler or a finalizer"):
            limiter.limit(MANY, "x")
        with pytest.raises(ReentrantCall):
            limiter.limit_many([])
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(bool(limiter.limit(MANY, "x"))))
    thread.start()
    thread.join(30)
    assert found == [True]
    assert limiter.peek(MANY, "x").effective == 1


def test_a_finalizer_may_ask_for_a_decision() -> None:
    limiter = make_limiter(clock=ManualClock(EPOCH_MS))
    served = []

    class Loud:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            served.append(bool(limiter.limit(MANY, "x")))

    Loud()
    gc.collect()
    assert served == [True]
