"""No call iterates over all subjects: the number of lines that one call runs does not depend on how many there are.

Counted with a trace function, so that loops count and wall-clock time does not. Compiled code has no lines to count;
it is the same source.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import tidegate
from tests.core.nodes import DictLedger, DictOrigin, Node
from tidegate.core.model import DEGRADED, LedgerRow, Limit, Tuning

pytestmark = pytest.mark.skipif(
    tidegate.compiled, reason="compiled code has no lines to count: the interpreted run counts them"
)

LIMIT = Limit(10, duration_ms=60_000, namespace="default")
T = 60_000 * 1000
FEW, MANY = 300, 3_000


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of tidegate.core one call runs."""
    lines = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        if "tidegate/core" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def crowd(count: int, *, subjects_max: int = 10**6, dirty: bool = False) -> Node:
    """A node that remembers `count` subjects, all acknowledged or all dirty, all with a cell to publish."""
    node = Node(has_ledger=True, tuning=Tuning(anticipation=False, subjects_max=subjects_max))
    for i in range(count):
        node.decide(LIMIT, f"id{i}", 5, T, DEGRADED)
    if not dirty:
        node.replay(DictOrigin(), T)
    return node


def same(prepare: Callable[[int], Node], call: Callable[[Node], object]) -> None:
    """One call costs the same on a node with few subjects and on one with many."""
    small, large = prepare(FEW), prepare(MANY)
    few = lines_run(lambda: call(small))
    many = lines_run(lambda: call(large))
    assert few > 0
    # Not one line for each further subject, nor for each hundredth.
    assert many <= few + (MANY - FEW) // 100


@pytest.mark.parametrize("cost", [1, 100, 0])
def test_decisions_cost_the_same_among_few_and_among_many(cost: int) -> None:
    same(crowd, lambda node: node.engine.decide(LIMIT, "id7", cost, T))


@pytest.mark.parametrize("dirty", [False, True])
def test_a_new_subject_at_the_memory_bound_costs_the_same(dirty: bool) -> None:
    same(
        lambda count: crowd(count, subjects_max=count, dirty=dirty),
        lambda node: node.engine.decide(LIMIT, "new", 1, T + 1),
    )


def test_a_new_subject_when_all_are_blocked_costs_the_same() -> None:
    def all_denied(count: int) -> Node:
        node = Node(tuning=Tuning(subjects_max=count))
        for i in range(count):
            node.decide(LIMIT, f"id{i}", 11, T + i % 50)
        return node

    same(all_denied, lambda node: node.engine.decide(LIMIT, "new", 1, T + 60))


def test_a_new_subject_when_all_have_expired_costs_the_same() -> None:
    same(crowd, lambda node: node.engine.decide(LIMIT, "new", 1, T + 600_000))


def test_expiry_costs_as_much_as_it_is_asked_to_check() -> None:
    same(crowd, lambda node: node.engine.subjects.expire(T + 600_000, 50))


def test_a_replay_costs_what_one_command_carries() -> None:
    same(lambda count: crowd(count, dirty=True), lambda node: node.origin_sync.plan_replay(T, 50))


def test_a_sweep_costs_what_one_slice_holds() -> None:
    def healing(count: int) -> Node:
        node = crowd(count)
        node.sweep.start_heal()
        return node

    same(healing, lambda node: node.sweep.run(50))


def test_publishing_costs_what_has_changed() -> None:
    def little_changed(count: int) -> Node:
        node = crowd(count)
        node.publish(DictLedger(), T)
        for i in range(20):
            node.decide(LIMIT, f"id{i}", 1, T, DEGRADED)
        return node

    same(little_changed, lambda node: node.plan_publish(T))


def test_a_slice_of_a_publish_turn_costs_as_much_as_it_is_asked_to_take() -> None:
    same(crowd, lambda node: node.ledger_sync.collect_publish([], T, 50))


def test_an_import_costs_what_it_brings() -> None:
    rows = [
        LedgerRow("default", "default", f"id{i}", 60_000, 1000, "iad", 3, 60_000 * 1002) for i in range(20)
    ]
    same(crowd, lambda node: node.ledger_sync.apply_import(rows, T))


def test_a_replay_skips_a_bounded_number_of_aged_subjects() -> None:
    same(
        lambda count: crowd(count, dirty=True),
        lambda node: node.origin_sync.plan_replay(T + 3_600_000, 50, 100),
    )
