"""Many threads on one subject never exceed the limit and never lose an accepted unit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from tests.core.nodes import DictOrigin
from tidegate.core.engine import Engine
from tidegate.core.freshness import Need
from tidegate.core.gate import Gate
from tidegate.core.model import DEGRADED, ORIGIN, Decision, Limit, Request, Tuning
from tidegate.core.origin_sync import OriginSync
from tidegate.core.sweep import Sweep
from tidegate.core.tickets import Ticket

THREADS = 8
NOW_MS = 1_700_000_000_000


@pytest.fixture(autouse=True)
def switching_all_the_time() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def never(*_arguments: object) -> NoReturn:
    raise AssertionError("nothing needs to be read")


def locked_gate(
    engine: Engine, settle: Callable[[Limit, str, int, int, Need | Ticket], Decision] = never
) -> Gate:
    lock = threading.RLock()
    return Gate(engine, lambda: NOW_MS * 1_000_000, lambda: None, settle, lock.acquire, lock.release)


def together(work: Callable[[int], int]) -> int:
    """Run `work(number)` in all threads at once; the sum of what they return. A failure in one fails the test."""
    begin = threading.Barrier(THREADS)
    results: list[int] = []
    failures: list[BaseException] = []

    def run(number: int) -> None:
        begin.wait()
        try:
            results.append(work(number))
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread, which raises it
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert len(results) == THREADS
    return sum(results)


def test_invariant_07_check_and_commit_are_one_step_on_threads() -> None:
    engine = Engine(Tuning(), node_id="n1")
    gate = locked_gate(engine)
    limit = Limit(25_000, duration_ms=60_000, namespace="default")

    def hammer(number: int) -> int:
        return sum(bool(gate.limit(limit, "a")) for _ in range(5_000))

    assert together(hammer) == 25_000
    assert gate.limit(limit, "a", 0).effective == 25_000
    assert (engine.allowed, engine.denied) == (25_001, 15_000)


def test_threads_with_different_costs_never_exceed_the_limit_nor_lose_a_unit() -> None:
    gate = locked_gate(Engine(Tuning(), node_id="n1"))
    limit = Limit(45_000, duration_ms=60_000, namespace="default")

    def hammer(number: int) -> int:
        return sum(cost for i in range(4_000) if gate.limit(limit, "a", cost := 1 + (i + number) % 3))

    accepted = together(hammer)
    assert gate.limit(limit, "a", 0).effective == accepted
    assert 44_998 <= accepted <= 45_000


def test_invariant_06_a_batch_is_all_or_nothing_to_every_observer() -> None:
    """Two counters that are always used together hold the same count, whenever they are read."""
    gate = locked_gate(Engine(Tuning(), node_id="n1"))
    limit = Limit(2_000, duration_ms=60_000, namespace="default")

    def hammer(number: int) -> int:
        accepted = 0
        order = ["a", "b"] if number % 2 else ["b", "a"]
        for _ in range(400):
            decisions, _ = gate.decide_many([Request(limit, identifier) for identifier in order])
            assert decisions is not None
            accepted += all(decisions)
            looks, _ = gate.decide_many([Request(limit, "a", 0), Request(limit, "b", 0)])
            assert looks is not None and looks[0].effective == looks[1].effective
        return accepted

    assert together(hammer) == 2_000
    assert gate.limit(limit, "a", 0).effective == gate.limit(limit, "b", 0).effective == 2_000


def test_threads_on_many_subjects_keep_a_tight_memory_bound() -> None:
    engine = Engine(Tuning(subjects_max=50, touch_ms=1), node_id="n1")
    gate = locked_gate(engine)
    limit = Limit(10, duration_ms=1_000, namespace="default")

    def hammer(number: int) -> int:
        for i in range(600):
            gate.limit(limit, f"id{(i * 7 + number) % 130}", 1, NOW_MS + i)
        return 0

    together(hammer)
    subjects = engine.subjects
    remembered = [subject for subject in subjects.slots if subject is not None]
    assert subjects.count == len(remembered) <= 50
    assert subjects.count == sum(table.count for table in subjects.tables.values())
    assert len(subjects.slots) <= 51


def test_threads_that_replay_and_read_meanwhile_lose_no_accepted_unit() -> None:
    """As drivers do: decisions and reads on some threads, replays on another, all with one origin."""
    engine = Engine(Tuning(fresh_ms=2), node_id="n1", has_origin=True)
    sweep = Sweep(engine.subjects, engine.pending, engine.global_view)
    origin_sync = OriginSync(engine, sweep, Tuning(fresh_ms=2))
    origin = DictOrigin()
    origin_lock = threading.Lock()
    limit = Limit(3_000, duration_ms=60_000, namespace="default")

    def settle(limit: Limit, identifier: str, cost: int, now_ms: int, need: Need | Ticket) -> Decision:
        assert isinstance(need, Need)
        with origin_lock:
            replies = origin.read(need.wanted)
        with gate:
            origin_sync.apply_read(need, replies, now_ms)
        answer = gate.decide(limit, identifier, cost, now_ms, ORIGIN)
        assert isinstance(answer, Decision)
        return answer

    gate = locked_gate(engine, settle)

    def replay_once() -> int:
        with gate:
            replay = origin_sync.plan_replay(NOW_MS, 10)
        if replay is None:
            return 0
        with origin_lock:
            replies = origin.merge(replay.components)
        with gate:
            origin_sync.apply_replay(replay, replies, NOW_MS)
        return len(replies)

    def work(number: int) -> int:
        if number == 0:
            return 0 * sum(replay_once() for _ in range(300))
        return sum(bool(gate.limit(limit, "a", 1, NOW_MS + i)) for i in range(500))

    accepted = together(work)
    assert accepted == 3_000
    while replay_once():
        pass
    assert [sum(held.values()) for held in origin.cells.values()] == [3_000]
    assert not sweep.is_active
    answer = gate.decide(limit, "a", 0, NOW_MS, DEGRADED)
    assert isinstance(answer, Decision) and answer.effective == 3_000
