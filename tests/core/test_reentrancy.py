"""Check and commit are one step: no call can run between them, not even on the same thread.

A signal handler or a finalizer runs in the middle of whatever its thread is doing. Waiting for the decision that it
interrupted would deadlock, so it is refused, and the interrupted one goes on as if nothing had happened.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import pytest

import tidegate
from tidegate.core.engine import Engine
from tidegate.core.gate import Gate
from tidegate.core.model import DEGRADED, Limit, Request, Tuning
from tidegate.errors import ReentrantCall

LIMIT = Limit(1_000_000, duration_ms=86_400_000, namespace="default")
NOW_NS = 1_700_000_000_000 * 1_000_000


def never(*_arguments: object) -> NoReturn:
    raise AssertionError("nothing needs to be read")


class LockedGate:
    """A locked gate, and how often calls from within a decision were accepted and refused."""

    def __init__(self, now_ns: Callable[[], int] = lambda: NOW_NS, *, has_origin: bool = False) -> None:
        self.lock = threading.RLock()
        self.engine = Engine(Tuning(), node_id="n1", has_origin=has_origin)
        self.gate = Gate(self.engine, now_ns, lambda: None, never, self.lock.acquire, self.lock.release)
        self.accepted = 0
        self.refused = 0
        # A first subject, so that there is a table in which an identifier is looked up.
        self.engine.decide(LIMIT, "first", 0, NOW_NS // 1_000_000, DEGRADED)

    def call_from_within(self) -> None:
        try:
            assert self.gate.limit(LIMIT, "a")
        except ReentrantCall:
            self.refused += 1
        else:
            self.accepted += 1

    def counted(self) -> int:
        return self.gate.limit(LIMIT, "a", 0).effective

    def is_free_for_other_threads(self) -> bool:
        found: list[bool] = []

        def look() -> None:
            found.append(self.lock.acquire(blocking=False))
            if found[0]:
                self.lock.release()

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return found[0]


class CallingName(str):
    """An identifier that asks for a decision whenever it is hashed."""

    __slots__ = ("on_hash",)
    on_hash: Callable[[], None]

    def __hash__(self) -> int:
        self.on_hash()
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def calling_name(identifier: str, on_hash: Callable[[], None]) -> CallingName:
    one = CallingName(identifier)
    one.on_hash = on_hash
    return one


def test_a_call_from_within_a_decision_is_refused_and_the_decision_continues() -> None:
    locked = LockedGate()
    assert locked.gate.limit(LIMIT, calling_name("a", locked.call_from_within))
    assert locked.refused >= 1 and locked.accepted == 0
    assert locked.counted() == 1
    assert locked.is_free_for_other_threads()


def test_a_call_from_within_a_batch_or_a_loop_is_refused() -> None:
    locked = LockedGate()
    with locked.gate:
        locked.call_from_within()
        with pytest.raises(ReentrantCall):
            locked.gate.decide_many([Request(LIMIT, "a")])
        with pytest.raises(ReentrantCall), locked.gate:
            pass
    assert (locked.refused, locked.accepted) == (1, 0)
    assert locked.counted() == 0
    assert locked.is_free_for_other_threads()


def test_the_refusal_says_what_happened_and_may_be_tried_again() -> None:
    locked = LockedGate()
    with locked.gate, pytest.raises(ReentrantCall, match="in the middle of another one") as caught:
        locked.gate.limit(LIMIT, "a")
    assert caught.value.transient
    assert locked.gate.limit(LIMIT, "a")


def test_a_name_is_remembered_as_a_plain_str_that_runs_no_code_of_a_subclass_later() -> None:
    locked = LockedGate()
    calls: list[str] = []
    locked.gate.limit(LIMIT, calling_name("a", lambda: calls.append("hashed")))
    assert calls, "it runs while its caller waits for it"
    assert {type(subject.identifier) for subject in locked.engine.subjects.slots if subject} == {str}
    calls.clear()
    assert locked.counted() == 1
    while locked.engine.subjects.expire(NOW_NS, 10):
        pass
    assert locked.engine.subjects.count == 0
    assert calls == []


def test_an_exception_from_within_leaves_the_gate_open_and_nothing_counted() -> None:
    locked = LockedGate()

    def explode() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        locked.gate.limit(LIMIT, calling_name("a", explode))
    assert locked.counted() == 0
    assert locked.is_free_for_other_threads()


# -- signals


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Sets what SIGUSR1 and SIGALRM do, for one test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGALRM)}

    def handle(action: Callable[[], None]) -> None:
        for number in before:
            signal.signal(number, lambda _number, _frame: action())

    yield handle
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_handler_in_the_middle_of_a_decision_is_refused(
    on_signal: Callable[[Callable[[], None]], None],
) -> None:
    locked = LockedGate()
    on_signal(locked.call_from_within)
    assert locked.gate.limit(LIMIT, calling_name("a", lambda: signal.raise_signal(signal.SIGUSR1)))
    assert locked.refused >= 1 and locked.accepted == 0
    assert locked.counted() == 1


def test_a_signal_handler_while_the_clock_is_read_is_served_first(
    on_signal: Callable[[Callable[[], None]], None],
) -> None:
    interrupt = True

    def now_ns() -> int:
        nonlocal interrupt
        if interrupt:
            interrupt = False
            signal.raise_signal(signal.SIGUSR1)
        return NOW_NS

    locked = LockedGate(now_ns)
    on_signal(locked.call_from_within)
    assert locked.gate.limit(LIMIT, "a")
    assert (locked.accepted, locked.refused) == (1, 0)
    assert locked.counted() == 2


def test_a_storm_of_signals_loses_no_accepted_unit(
    on_signal: Callable[[Callable[[], None]], None],
) -> None:
    locked = LockedGate()
    on_signal(locked.call_from_within)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    decided = 0
    while locked.accepted + locked.refused < 200:
        assert locked.gate.limit(LIMIT, "a")
        decided += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert locked.counted() == decided + locked.accepted
    assert locked.is_free_for_other_threads()


# -- every moment of a decision


@pytest.mark.skipif(tidegate.compiled, reason="compiled code has no lines between which a call could run")
@pytest.mark.parametrize("identifier", ["a", "new"])
def test_invariant_07_check_and_commit_are_one_step_at_every_line_of_a_decision(identifier: str) -> None:
    locked = LockedGate(has_origin=True)
    locked.engine.decide(LIMIT, "a", 1, NOW_NS // 1_000_000, DEGRADED)
    moments = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal moments
        name = frame.f_code.co_filename
        if "tidegate/core" not in name or name.endswith("gate.py"):
            return trace if name.endswith("gate.py") else None
        if event == "line":
            moments += 1
            locked.call_from_within()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        locked.gate.decide(LIMIT, identifier, 5, NOW_NS // 1_000_000, DEGRADED)
    finally:
        sys.settrace(before)
    assert moments > 10
    assert (locked.refused, locked.accepted) == (moments, 0)
    expected = {"a": 6, "new": 5}[identifier]
    answer = locked.gate.decide(LIMIT, identifier, 0, NOW_NS // 1_000_000, DEGRADED)
    assert isinstance(answer, tidegate.Decision) and answer.effective == expected


class Finalized:
    """Garbage in a cycle that asks for a decision when it is collected."""

    def __init__(self, locked: LockedGate) -> None:
        self.me = self
        self.locked = locked

    def __del__(self) -> None:
        self.locked.call_from_within()


def test_finalizers_that_the_garbage_collector_runs_lose_no_accepted_unit() -> None:
    locked = LockedGate()
    limits = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    try:
        for i in range(200):
            Finalized(locked)
            assert locked.gate.limit(LIMIT, f"new{i}")
    finally:
        gc.set_threshold(*limits)
    gc.collect()
    assert locked.accepted + locked.refused == 200
    assert locked.counted() == locked.accepted
    assert locked.engine.subjects.count == 202
