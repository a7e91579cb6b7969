"""Clocks that jump ahead and step back: cells are named by their sequence, so nothing is counted twice or forgotten
while it matters, and the number of cells stays small."""

from __future__ import annotations

from tests.core import oracle
from tests.core.nodes import DictOrigin, Node
from tidegate.core.freshness import STALE, Need
from tidegate.core.model import DEGRADED, Decision, Limit

SECOND = Limit(10, duration_ms=1_000, namespace="default")
T = 1_000_000
M = 1_020_000


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


def test_a_repeated_denial_includes_what_a_later_cell_has_counted_meanwhile() -> None:
    """At a boundary, a thread that read the clock just before it may come after a thread that read it just after."""
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


def test_a_subject_with_a_cell_in_the_far_future_keeps_few_cells() -> None:
    """No newer cell pushes the aged ones out until the clock has caught up, which may take a year."""
    node = Node(has_origin=False)
    node.decide(SECOND, "a", 1, T + 10**10)
    for second in range(1_000):
        assert node.decide(SECOND, "a", 4, T + 1_000 * second)
        assert node.decide(SECOND, "a", 0, T + 1_000 * second + 999).effective == 4
    assert len(node.subject(SECOND, "a").cells()) < 15
    assert node.decide(SECOND, "a", 0, T + 10**10).effective == 1


# -- a request's own time


def test_a_request_from_the_future_expires_no_other_subject() -> None:
    node = Node(has_origin=False)
    victims = [f"victim{number}" for number in range(8)]
    for victim in victims:
        node.decide(SECOND, victim, 10, T)
    for number in range(20):
        node.engine.decide(SECOND, f"far{number}", 1, T + 10**9, wall_ms=T)
    for victim in victims:
        decision = node.engine.decide(SECOND, victim, 1, T, wall_ms=T)
        assert isinstance(decision, Decision) and not decision


def test_unreplayed_counts_survive_requests_from_the_future() -> None:
    node, origin = Node(), DictOrigin()
    for number in range(30):
        node.engine.decide(SECOND, f"u{number}", 10, T, DEGRADED, wall_ms=T)
    for number in range(30):
        node.engine.decide(SECOND, f"far{number}", 1, T + 10**9, DEGRADED, wall_ms=T)
    assert node.replay(origin, T) == 60
    assert sum(sum(held.values()) for held in origin.cells.values()) == 330


def test_a_request_from_the_future_is_used_now() -> None:
    node = Node()
    node.engine.decide(SECOND, "a", 1, T + 10**9, DEGRADED, wall_ms=T)
    assert node.subject(SECOND, "a").touched_ms == T


def test_requests_from_the_future_keep_the_cells_of_the_present() -> None:
    node = Node(has_origin=False)
    node.decide(SECOND, "a", 4, T - 1_000)
    node.decide(SECOND, "a", 3, T)
    for ahead_ms in (1_000, 2_000, 3_000, 2_000):
        node.engine.decide(SECOND, "a", 1, T + ahead_ms, wall_ms=T)
    assert node.decide(SECOND, "a", 0, T).effective == 3 + 4


def test_requests_with_many_future_times_leave_few_cells() -> None:
    node = Node(has_origin=False)
    for number in range(1_000):
        node.engine.decide(SECOND, "a", 1, T + 10_000 * (number * 7 % 1_000), wall_ms=T)
    assert len(node.subject(SECOND, "a").cells()) < 200


def test_a_request_with_a_time_in_the_past_is_not_fresher_than_the_node() -> None:
    minute = Limit(100, duration_ms=60_000, namespace="default")
    node, origin = Node(), DictOrigin()
    node.limit(minute, "a", 1, T, origin)
    answer = node.engine.decide(minute, "a", 1, T + 4_000, wall_ms=T + 5_000)
    assert isinstance(answer, Need) and answer.reason == STALE


# -- a clock that steps back


def test_a_step_back_does_not_make_exhausted_identifiers_pass() -> None:
    minute = Limit(10, duration_ms=60_000, namespace="default")
    node, other, origin = Node("n1"), Node("n2"), DictOrigin()
    node.limit(minute, "a", 1, M + 50_000, origin)
    other.limit(minute, "a", 9, M + 50_001, origin)
    other.replay(origin, M + 50_001)
    back_ms = M + 30_000
    assert node.need(minute, "a", 1, back_ms).reason == STALE
    assert not node.limit(minute, "a", 1, back_ms, origin)
    reads = origin.reads
    assert node.limit(minute, "b", 1, back_ms, origin)
    assert node.limit(minute, "b", 1, back_ms + 4_999, origin)
    assert origin.reads == reads + 1, "after the step, answers last as long as ever"


def test_after_a_step_back_a_failed_read_does_not_pause_reads_for_the_whole_step() -> None:
    minute = Limit(10, duration_ms=60_000, namespace="default")
    node, origin = Node(), DictOrigin()
    node.limit(minute, "a", 1, M + 50_000)
    assert node.limit(minute, "a", 1, M + 30_000, origin).source == "origin"
    assert node.limit(minute, "a", 1, M + 30_001, origin).source == "local"


def test_after_a_small_step_back_a_failed_read_is_not_an_answer() -> None:
    minute = Limit(10, duration_ms=60_000, namespace="default")
    node, origin = Node(), DictOrigin()
    node.limit(minute, "a", 1, M + 50_000)
    assert node.limit(minute, "a", 1, M + 49_000, origin).source == "origin"


def test_after_a_step_back_an_answer_from_before_it_does_not_follow_a_failed_read() -> None:
    minute = Limit(10, duration_ms=60_000, namespace="default")
    node, origin = Node(), DictOrigin()
    node.limit(minute, "a", 1, M + 50_000, origin)
    assert node.limit(minute, "a", 1, M + 30_000).source == "degraded"
    assert node.limit(minute, "a", 1, M + 30_001).source == "degraded"
