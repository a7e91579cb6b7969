"""Clocks that jump ahead and step back: cells are named by their sequence, so nothing is counted twice or forgotten
while it matters, and nothing piles up."""

from __future__ import annotations

from tests.core import oracle
from tests.core.nodes import Node
from tidegate.core.model import Limit

SECOND = Limit(10, duration_ms=1_000, namespace="default")
T = 1_000_000


def test_a_clock_that_jumped_far_ahead_and_back_finds_its_counts_again() -> None:
    node = Node(has_origin=False)
    node.decide(SECOND, "a", 4, T - 1_000)
    node.decide(SECOND, "a", 3, T)
    node.decide(SECOND, "a", 2, T + 3_600_000)
    assert node.decide(SECOND, "a", 0, T).effective == 3 + 4
    assert node.decide(SECOND, "a", 0, T + 3_600_000).effective == 2


def test_a_step_back_by_a_cell_counts_in_the_earlier_cell() -> None:
    node = Node(has_origin=False)
    node.decide(SECOND, "a", 5, T)
    node.decide(SECOND, "a", 4, T - 1)
    assert node.cell(SECOND, "a", 999).own == 4
    assert node.cell(SECOND, "a", 1000).own == 5
    assert node.decide(SECOND, "a", 0, T).effective == 9


def test_a_denial_told_again_knows_what_a_later_cell_has_counted_meanwhile() -> None:
    """At a boundary, threads that read the clock just before it come after threads that read it just behind."""
    node = Node(has_origin=False)
    node.decide(SECOND, "a", 10, T)
    node.decide(SECOND, "a", 1, T + 1_900)
    before = T + 999
    for cost, accepted_later in ((5, 1), (5, 4)):
        history = {1000: 10, 1001: accepted_later}
        denial = node.decide(SECOND, "a", cost, before)
        assert not denial
        assert denial.retry_after_ms == oracle.retry_after_ms(history, cost, 10, before, 1_000)
        assert node.decide(SECOND, "a", 3, T + 1_900)


def test_a_subject_that_once_saw_the_far_future_does_not_pile_up_cells() -> None:
    """No newer cell pushes the aged ones out until the clock has caught up, which may take a year."""
    node = Node(has_origin=False)
    node.decide(SECOND, "a", 1, T + 10**10)
    for second in range(1_000):
        assert node.decide(SECOND, "a", 4, T + 1_000 * second)
        assert node.decide(SECOND, "a", 0, T + 1_000 * second + 999).effective == 4
    assert len(node.subject(SECOND, "a").cells()) < 15
    assert node.decide(SECOND, "a", 0, T + 10**10).effective == 1
