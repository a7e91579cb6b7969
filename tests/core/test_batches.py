"""Batches: one instant, one step, all or nothing; the order of items does not matter."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import oracle
from tests.core.nodes import DictOrigin, Node
from tidegate.core.freshness import STRICT
from tidegate.core.model import ORIGIN, Decision, LedgerRow, Limit, Request, Tuning

NOW_MS = 100_500

# Three counters of one identifier: two durations, and each duration under several limits.
limits = st.builds(
    Limit, st.integers(1, 12), duration_ms=st.sampled_from([1000, 2000]), namespace=st.just("default")
)
requests = st.builds(Request, limits, st.sampled_from(["a", "b"]), st.integers(0, 8))
batches = st.lists(requests, max_size=6)
# What was counted before, at which instant: in the current and in the previous cells.
pasts = st.lists(st.tuples(requests, st.integers(NOW_MS - 2500, NOW_MS)), max_size=8)


def with_past(past: list[tuple[Request, int]]) -> Node:
    node = Node(has_origin=False)
    for request, at_ms in sorted(past, key=lambda one: one[1]):
        generous = Limit(1000, duration_ms=request.limit.duration_ms, namespace="default")
        assert node.decide(generous, request.identifier, request.cost, at_ms)
    return node


def history(node: Node, request: Request) -> dict[int, int]:
    """Everything that the node has counted for a request's counter."""
    if not node.knows(request.limit, request.identifier):
        return {}
    cells = node.subject(request.limit, request.identifier).cells()
    return {cell.sequence: cell.own for cell in cells}


def everything(node: Node, batch: list[Request]) -> list[dict[int, int]]:
    return [history(node, request) for request in batch]


@given(pasts, batches)
@settings(max_examples=200)
def test_a_batch_that_passes_equals_its_requests_one_by_one(
    past: list[tuple[Request, int]], batch: list[Request]
) -> None:
    together, one_by_one = with_past(past), with_past(past)
    decisions = together.limit_many(batch, NOW_MS)
    assert len(decisions) == len(batch)
    if not all(decisions):
        return
    for request, decision in zip(batch, decisions, strict=True):
        alone = one_by_one.decide(request.limit, request.identifier, request.cost, NOW_MS)
        assert repr(alone) == repr(decision)
    assert everything(together, batch) == everything(one_by_one, batch)


@given(pasts, batches)
@settings(max_examples=200)
def test_invariant_06_a_batch_that_fails_changes_no_count(
    past: list[tuple[Request, int]], batch: list[Request]
) -> None:
    node = with_past(past)
    before = {request: history(node, request) for request in batch}
    if all(node.limit_many(batch, NOW_MS)):
        return
    for request in batch:
        after = history(node, request)
        assert {sequence: own for sequence, own in after.items() if own} == {
            sequence: own for sequence, own in before[request].items() if own
        }


@given(st.data(), pasts, batches)
@settings(max_examples=200)
def test_no_order_of_items_lets_a_batch_through_that_another_would_not(
    data: st.DataObject, past: list[tuple[Request, int]], batch: list[Request]
) -> None:
    passed = all(with_past(past).limit_many(batch, NOW_MS))
    other_order = data.draw(st.permutations(batch))
    assert all(with_past(past).limit_many(other_order, NOW_MS)) == passed

    node = with_past(past)
    for request in batch:
        whole = sum(
            other.cost
            for other in batch
            if (other.identifier, other.limit.key) == (request.identifier, request.limit.key)
        )
        state = oracle.effective(history(node, request), 0, NOW_MS, request.limit.duration_ms)
        if state + whole > request.limit.quota:
            assert not passed
            break
    else:
        assert passed


@given(pasts, batches)
@settings(max_examples=200)
def test_each_item_of_a_failed_batch_is_judged_behind_the_earlier_items_that_fit(
    past: list[tuple[Request, int]], batch: list[Request]
) -> None:
    node = with_past(past)
    states = [history(node, request) for request in batch]
    decisions = node.limit_many(batch, NOW_MS)
    if all(decisions):
        return
    fitted: dict[tuple[str, int], int] = {}
    demands: list[int] = []
    for request, state in zip(batch, states, strict=True):
        counter = (request.identifier, request.limit.duration_ms)
        demands.append(fitted.get(counter, 0) + request.cost)
        if oracle.fits(state, demands[-1], request.limit.quota, NOW_MS, request.limit.duration_ms):
            fitted[counter] = demands[-1]
    every_item_fits = all(
        oracle.fits(state, demand, request.limit.quota, NOW_MS, request.limit.duration_ms)
        for request, state, demand in zip(batch, states, demands, strict=True)
    )
    for request, state, demand, decision in zip(batch, states, demands, decisions, strict=True):
        duration_ms = request.limit.duration_ms
        whole = fitted.get((request.identifier, duration_ms), 0)
        if every_item_fits and not oracle.fits(state, whole, request.limit.quota, NOW_MS, duration_ms):
            # Only the second check, on the final state, finds that it does not fit.
            check_item(decision, state, request, whole)
        else:
            check_item(decision, state, request, demand)


def check_item(decision: Decision, state: dict[int, int], request: Request, demand: int) -> None:
    duration_ms = request.limit.duration_ms
    used = oracle.effective(state, demand, NOW_MS, duration_ms)
    assert decision.effective == used
    assert decision.allowed == (used <= request.limit.quota)
    if decision:
        # No item of this batch consumed anything.
        left = request.limit.quota - oracle.effective(state, 0, NOW_MS, duration_ms)
        assert decision.remaining == left
        assert decision.retry_after_ms == 0
    else:
        assert decision.remaining == 0
        expected = oracle.retry_after_ms(state, demand, request.limit.quota, NOW_MS, duration_ms)
        assert expected != 0
        assert decision.retry_after_ms == expected


def test_the_second_item_of_one_counter_sees_the_first() -> None:
    node = Node(has_origin=False)
    limit = Limit(10, duration_ms=1000, namespace="default")
    first, second = node.limit_many([Request(limit, "a", 6), Request(limit, "a", 6)], NOW_MS)
    assert first and not second
    assert (first.effective, first.remaining) == (6, 10)
    assert (second.effective, second.remaining) == (12, 0)
    assert node.decide(limit, "a", 0, NOW_MS).effective == 0


def test_a_low_limit_first_is_judged_by_what_the_later_items_add() -> None:
    node = Node(has_origin=False)
    low, high = (
        Limit(10, duration_ms=1000, namespace="default"),
        Limit(20, duration_ms=1000, namespace="default"),
    )
    for batch in (
        [Request(low, "a", 5), Request(high, "a", 7)],
        [Request(high, "a", 7), Request(low, "a", 5)],
    ):
        decisions = node.limit_many(batch, NOW_MS)
        assert [d.limit.quota for d in decisions if not d] == [10]
    assert node.limit_many([Request(low, "a", 3), Request(high, "a", 7)], NOW_MS)


def test_two_durations_of_one_identifier_do_not_see_each_other() -> None:
    node = Node(has_origin=False)
    decisions = node.limit_many(
        [
            Request(Limit(5, duration_ms=1000, namespace="default"), "a", 5),
            Request(Limit(5, duration_ms=2000, namespace="default"), "a", 5),
        ],
        NOW_MS,
    )
    assert [decision.effective for decision in decisions] == [5, 5]


def test_an_item_that_never_fits_with_its_batch_has_no_retry_time() -> None:
    node = Node(has_origin=False)
    limit = Limit(10, duration_ms=1000, namespace="default")
    _, second = node.limit_many([Request(limit, "a", 6), Request(limit, "a", 6)], NOW_MS)
    assert not second
    assert second.retry_after_ms is None


def test_an_item_that_its_own_batch_delays_has_the_retry_time_at_which_both_fit() -> None:
    node = Node(has_origin=False)
    limit = Limit(10, duration_ms=1000, namespace="default")
    node.decide(limit, "a", 8, 100_000)
    batch = [Request(limit, "a", 2), Request(limit, "a", 2)]
    first, second = node.limit_many(batch, NOW_MS)
    assert first and not second
    wait_ms = second.retry_after_ms
    assert wait_ms is not None and wait_ms > 0
    assert not all(node.limit_many(batch, NOW_MS + wait_ms - 1))
    assert all(node.limit_many(batch, NOW_MS + wait_ms))


def test_an_empty_batch_passes_and_counts_nothing() -> None:
    node = Node()
    assert node.engine.decide_many([], NOW_MS) == ([], [])
    assert node.engine.subjects.count == 0


def test_a_batch_larger_than_the_memory_bound_is_decided_as_a_whole_and_the_bound_holds_afterwards() -> None:
    node = Node(has_origin=False, tuning=Tuning(subjects_max=3))
    limit = Limit(2, duration_ms=1000, namespace="default")
    batch = [Request(limit, f"id{i}", 1) for i in range(10)] + [Request(limit, "id0", 2)]
    decisions = node.limit_many(batch, NOW_MS)
    assert [decision.allowed for decision in decisions] == [True] * 10 + [False]
    assert node.engine.subjects.count == 3
    assert all(node.limit_many(batch[:10], NOW_MS))
    assert node.engine.subjects.count == 3


def test_an_accepted_batch_larger_than_the_memory_bound_evicts_unreplayed_counts_and_reports_it() -> None:
    node = Node(tuning=Tuning(subjects_max=3))
    limit = Limit(2, duration_ms=1000, namespace="default")
    assert all(node.limit_many([Request(limit, f"id{i}", 1) for i in range(10)], NOW_MS, DictOrigin()))
    assert node.engine.subjects.count == 3
    assert node.engine.subjects.evicted_unreplayed == 7


def test_a_batch_evicts_its_own_idle_subjects_before_unreplayed_counts() -> None:
    node, origin = Node(tuning=Tuning(subjects_max=2)), DictOrigin()
    limit = Limit(5, duration_ms=60_000, namespace="default")
    node.limit(limit, "unreplayed", 1, NOW_MS, origin)
    node.limit_many([Request(limit, "looked at", 0), Request(limit, "used", 1)], NOW_MS, origin)
    assert node.knows(limit, "unreplayed") and node.knows(limit, "used")
    assert node.engine.subjects.evicted_unreplayed == 0


def test_a_batch_reads_every_cold_counter_once_and_nothing_when_one_is_certain_to_fail() -> None:
    node = Node()
    limit = Limit(10, duration_ms=1000, namespace="default")
    batch = [Request(limit, "a", 1), Request(limit, "b", 1), Request(limit, "a", 2)]
    decisions, needs = node.engine.decide_many(batch, NOW_MS)
    assert decisions is None
    assert sorted(need.subject.identifier for need in needs) == ["a", "b"]
    assert {need.reason for need in needs} == {"cold"}
    assert all(len(need.wanted) == 2 for need in needs)

    decisions, needs = node.engine.decide_many([*batch, Request(limit, "c", 11)], NOW_MS)
    assert needs == [] and decisions is not None
    assert [bool(decision) for decision in decisions] == [True, True, True, False]


def test_a_failed_batch_makes_only_the_counters_strict_that_denied() -> None:
    node, origin = Node(), DictOrigin()
    limit = Limit(10, duration_ms=10_000, namespace="default")
    node.limit_many([Request(limit, "a", 10), Request(limit, "b", 1)], NOW_MS, origin)
    assert not all(node.limit_many([Request(limit, "a", 1), Request(limit, "b", 1)], NOW_MS))
    assert node.decide(limit, "b", 1, NOW_MS).source == "local"
    assert node.need(limit, "a", 0, NOW_MS).reason == STRICT


def test_a_batch_after_a_failed_read_is_degraded_in_every_item_that_fits() -> None:
    node = Node()
    limit = Limit(10, duration_ms=10_000, namespace="default")
    decisions = node.limit_many([Request(limit, "a", 1), Request(limit, "b", 1)], NOW_MS)
    assert [decision.source for decision in decisions] == ["degraded", "degraded"]
    again = node.limit_many([Request(limit, "a", 1), Request(limit, "b", 1)], NOW_MS + 299)
    assert [decision.source for decision in again] == ["degraded", "degraded"]
    assert node.engine.from_degraded == 4


def test_an_item_whose_counter_was_evicted_after_the_read_is_no_outage_for_the_others() -> None:
    local = Limit(10, duration_ms=10_000, namespace="local")
    careful = Limit(10, duration_ms=10_000, namespace="careful", on_outage="deny")
    batch = [Request(local, "evicted", 1), Request(careful, "known", 1)]
    for ordered in (batch, batch[::-1]):
        node = Node(tuning=Tuning(subjects_max=2, touch_ms=1))
        assert node.limit(careful, "known", 1, NOW_MS, DictOrigin())
        for later_ms, identifier in enumerate(("x", "y", "z")):
            node.limit(local, identifier, 0, NOW_MS + later_ms, DictOrigin())
        assert node.knows(careful, "known")
        decisions, _ = node.engine.decide_many(ordered, NOW_MS + 10, ORIGIN)
        assert decisions is not None and all(decisions)
        sources = {item.identifier: answer.source for item, answer in zip(ordered, decisions, strict=True)}
        assert sources == {"evicted": "degraded", "known": "origin"}


def test_anticipation_denies_a_whole_batch_without_making_a_subject_strict() -> None:
    node = Node(has_origin=False, has_ledger=True, tuning=Tuning())
    limit = Limit(100, duration_ms=60_000, namespace="default")
    at_ms = 600_000
    for grown, later_ms in ((10, 0), (50, 1000)):
        row = LedgerRow("default", "default", "a", 60_000, 10, "iad", grown, 720_000)
        node.ledger_sync.apply_import([row], at_ms + later_ms)
    now_ms = at_ms + 2000
    batch = [Request(limit, "a", 5), Request(limit, "b", 5), Request(limit, "a", 5)]
    decisions = node.limit_many(batch, now_ms)
    # 50 are known and 40 more are probable: 10 would fit now, but not with one more.
    assert all(decisions)
    more = node.limit_many([Request(limit, "a", 1), Request(limit, "b", 1)], now_ms)
    assert [bool(decision) for decision in more] == [False, True]
    assert more[0].effective == 61 and more[0].retry_after_ms
    assert node.engine.strict_activations == 0
    assert node.cell(limit, "b", 10).own == 5


def test_an_item_that_only_the_rest_of_its_batch_makes_unlikely_has_a_retry_time() -> None:
    node = Node(has_origin=False, has_ledger=True, tuning=Tuning())
    limit = Limit(100, duration_ms=60_000, namespace="default")
    for grown, at_ms in ((10, 600_000), (50, 601_000)):
        row = LedgerRow("default", "default", "a", 60_000, 10, "iad", grown, 720_000)
        node.ledger_sync.apply_import([row], at_ms)
    # 50 are known and 40 more are probable: the item of cost 0 fits on its own, but not with the 11 after it.
    decisions = node.limit_many([Request(limit, "a", 0), Request(limit, "a", 11)], 602_000)
    assert [bool(decision) for decision in decisions] == [False, False]
    assert all(decision.retry_after_ms for decision in decisions)
    assert [decision.effective for decision in decisions] == [50, 61]
