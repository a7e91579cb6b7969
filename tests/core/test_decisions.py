"""One request against one node's memory, judged by the oracle in fractions."""

from __future__ import annotations

import pickle
from copy import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core import oracle
from tests.core.nodes import Node
from tidegate.core.model import Decision, Limit, make_limit

COUNT_MAX = 2**53

counts = st.integers(0, COUNT_MAX) | st.integers(0, 30)
durations_ms = st.integers(1000, 5000) | st.integers(1000, 2_592_000_000) | st.integers(1000, 2**45)


def embedded() -> Node:
    return Node(has_origin=False)


def fill(node: Node, history: dict[int, int], duration_ms: int, order: list[int]) -> None:
    """Put the counts of `history` into the cells of "a", at instants in the given order.

    The limit is not part of a subject, so a huge one lets any count in.
    """
    huge = Limit(2**62, duration_ms=duration_ms, namespace="default")
    for sequence in order:
        assert node.decide(huge, "a", history[sequence], sequence * duration_ms + duration_ms - 1)


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[int, int], list[int], int, int]:
    """(history, the order of its requests, now_ms, duration_ms): now is in cell 50, later cells may be known."""
    duration_ms = draw(durations_ms)
    known = draw(st.sets(st.sampled_from([49, 50, 51]), min_size=1))
    known |= draw(st.sets(st.integers(60, 2000), max_size=2))
    history = {sequence: draw(counts) for sequence in known}
    order = draw(st.permutations(sorted(known)))
    elapsed_ms = draw(st.sampled_from([0, 1, duration_ms - 1]) | st.integers(0, duration_ms - 1))
    return history, order, 50 * duration_ms + elapsed_ms, duration_ms


@given(st.data(), situations())
def test_a_decision_equals_that_of_the_oracle_in_every_field(
    data: st.DataObject, situation: tuple[dict[int, int], list[int], int, int]
) -> None:
    history, order, now_ms, duration_ms = situation
    node = embedded()
    fill(node, history, duration_ms, order)
    cost = data.draw(counts, "cost")
    used = oracle.effective(history, cost, now_ms, duration_ms)
    quota = max(1, data.draw(counts | st.integers(used - 2, used + 2), "limit"))

    decision = node.decide(Limit(quota, duration_ms=duration_ms, namespace="default"), "a", cost, now_ms)

    assert decision.allowed == (used <= quota)
    assert bool(decision) == decision.allowed
    assert decision.limit.quota == quota
    assert decision.effective == used
    assert decision.remaining == max(0, quota - used)
    assert decision.reset_at_ms == 51 * duration_ms
    expected = oracle.retry_after_ms(history, cost, quota, now_ms, duration_ms)
    assert decision.retry_after_ms == expected
    assert (decision.retry_after_ms == 0) == decision.allowed
    assert (decision.retry_after_ms is None) == (cost > quota)
    assert (decision.source, decision.regional_age_ms, decision.global_age_ms) == ("local", None, None)


@given(st.data(), situations())
def test_a_request_is_refused_one_millisecond_before_its_retry_time_and_allowed_at_it(
    data: st.DataObject, situation: tuple[dict[int, int], list[int], int, int]
) -> None:
    history, order, now_ms, duration_ms = situation
    node = embedded()
    fill(node, history, duration_ms, order)
    used = oracle.effective(history, 0, now_ms, duration_ms)
    quota = max(1, data.draw(st.integers(0, used) | st.integers(0, 30), "limit"))
    cost = data.draw(st.integers(0, quota) | st.integers(max(0, quota - 3), quota), "cost")
    limit = Limit(quota, duration_ms=duration_ms, namespace="default")

    decision = node.decide(limit, "a", cost, now_ms)
    if decision:
        assert used + cost <= quota
        return
    wait_ms = decision.retry_after_ms
    assert wait_ms is not None
    assert decision.retry_after == wait_ms / 1000
    assert not node.decide(limit, "a", cost, now_ms + wait_ms - 1)
    assert node.decide(limit, "a", cost, now_ms + wait_ms)


@given(st.data(), st.integers(1, 40), st.integers(1000, 9000))
def test_an_accepted_cost_is_counted_in_full_and_a_denied_one_not_at_all(
    data: st.DataObject, quota: int, duration_ms: int
) -> None:
    node = embedded()
    limit = Limit(quota, duration_ms=duration_ms, namespace="default")
    history: dict[int, int] = {}
    now_ms = 7 * duration_ms
    for _ in range(data.draw(st.integers(1, 25))):
        now_ms += data.draw(st.integers(0, duration_ms))
        cost = data.draw(st.integers(0, quota + 1))
        fits = oracle.fits(history, cost, quota, now_ms, duration_ms)
        assert node.decide(limit, "a", cost, now_ms).allowed == fits
        if fits:
            sequence = now_ms // duration_ms
            history[sequence] = history.get(sequence, 0) + cost
        assert node.decide(limit, "a", 0, now_ms).effective == oracle.effective(
            history, 0, now_ms, duration_ms
        )


def test_identifiers_namespaces_workspaces_and_durations_are_counted_separately() -> None:
    node = embedded()
    limits = [
        Limit(1, duration_ms=1000, namespace="default"),
        Limit(1, duration_ms=2000, namespace="default"),
        Limit(1, duration_ms=1000, namespace="x"),
        Limit(1, duration_ms=1000, workspace="x", namespace="default"),
    ]
    for limit in limits:
        for identifier in ("a", "b"):
            assert node.decide(limit, identifier, 1, 5000)
    for limit in limits:
        assert not node.decide(limit, "a", 1, 5000)


def test_limits_of_the_same_duration_judge_the_same_counter() -> None:
    node = embedded()
    assert node.decide(Limit(10, duration_ms=1000, namespace="default"), "a", 6, 5000)
    assert not node.decide(Limit(5, duration_ms=1000, namespace="default"), "a", 0, 5000)
    assert node.decide(Limit(7, duration_ms=1000, namespace="default"), "a", 1, 5000).effective == 7


def test_a_quota_of_zero_denies_every_cost_forever_and_allows_cost_zero() -> None:
    node = embedded()
    blocked = make_limit(0, 1000, "test", "default")
    denial = node.decide(blocked, "a", 1, 5000)
    assert not denial
    assert (denial.retry_after_ms, denial.retry_after, denial.remaining) == (None, None, 0)
    assert node.decide(blocked, "a", 0, 5000)


def test_cost_zero_checks_without_consuming() -> None:
    node = embedded()
    limit = Limit(3, duration_ms=1000, namespace="default")
    for _ in range(10):
        assert node.decide(limit, "a", 0, 5000).remaining == 3
    assert node.decide(limit, "a", 3, 5000).remaining == 0
    assert node.decide(limit, "a", 0, 5000).allowed, "an exhausted window can be checked"


def test_a_decision_has_times_in_seconds_and_a_readable_repr() -> None:
    node = embedded()
    limit = Limit(1, duration_ms=1500, namespace="default")
    allowed = node.decide(limit, "a", 1, 3000)
    denied = node.decide(limit, "a", 1, 3000)
    assert (allowed.reset_at, allowed.retry_after) == (4.5, 0.0)
    assert denied.retry_after == pytest.approx(1.501)
    assert repr(allowed).startswith(
        "Decision(allowed, limit=Limit(1, duration_ms=1500, namespace='default'), remaining=0, effective=1, "
        "reset_at_ms=4500"
    )
    assert "denied" in repr(denied) and "source='local'" in repr(denied)


def test_a_decision_can_be_copied_and_pickled() -> None:
    """LimitExceeded carries it out of worker processes."""
    node = embedded()
    limit = Limit(1, duration_ms=1500, namespace="default")
    for cost in (1, 1, 2):
        decision = node.decide(limit, "a", cost, 3000)
        for twin in (copy(decision), pickle.loads(pickle.dumps(decision))):
            assert repr(twin) == repr(decision)
            assert (twin.allowed, twin.source, twin.regional_age_ms) == (decision.allowed, "local", None)


def test_decisions_are_counted_by_outcome() -> None:
    node = embedded()
    limit = Limit(2, duration_ms=1000, namespace="default")
    outcomes: list[Decision] = [node.decide(limit, "a", 1, 5000) for _ in range(5)]
    assert [bool(outcome) for outcome in outcomes] == [True, True, False, False, False]
    assert (node.engine.allowed, node.engine.denied) == (2, 3)
    assert node.engine.strict_activations == 1


def test_a_repeated_denial_says_how_long_to_wait_for_its_own_cost_and_time() -> None:
    node = embedded()
    limit = Limit(10, duration_ms=60_000, namespace="default")
    node.decide(limit, "a", 8, 60_000)
    first = node.decide(limit, "a", 5, 61_000)
    assert node.decide(limit, "a", 5, 61_000).retry_after_ms == first.retry_after_ms
    node.decide(limit, "a", 2, 61_000)
    assert node.decide(limit, "a", 3, 61_000).retry_after_ms != first.retry_after_ms
    assert node.decide(limit, "a", 5, 61_001).retry_after_ms != first.retry_after_ms


def test_a_denial_from_before_time_stepped_back_is_not_repeated() -> None:
    node = embedded()
    limit = Limit(10, duration_ms=60_000, namespace="default")
    node.decide(limit, "a", 10, 60_000)
    at_first = node.decide(limit, "a", 1, 61_000).retry_after_ms
    stepped_back = node.decide(limit, "a", 1, 60_500).retry_after_ms
    assert at_first is not None
    assert stepped_back == at_first + 500
    assert node.decide(limit, "a", 1, 61_000).retry_after_ms == at_first
