"""When a decision may use local memory: the table of DESIGN section 4, to the millisecond."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.nodes import PLAIN, DictOrigin, Node
from tidegate.core.engine import Engine
from tidegate.core.freshness import COLD, STALE, STRICT, Need
from tidegate.core.model import DEGRADED, ORIGIN, Decision, LedgerRow, Limit, OriginReply, Request, Tuning

MINUTE = Limit(10, duration_ms=60_000, namespace="default")
# In the middle of a minute, far from any boundary.
T = 30_000 + 60_000 * 1000
SEQUENCE = 1000


def warmed(limit: Limit = MINUTE, at_ms: int = T, others: int = 0) -> Node:
    """A node that knows "a", at `at_ms`."""
    node = Node()
    need = node.need(limit, "a", 0, at_ms)
    node.origin_sync.apply_read(need, [OriginReply(others, 0), OriginReply(0, 0)], at_ms)
    return node


# -- cold


def test_a_cold_subject_reads_both_cells_in_one_round_trip() -> None:
    node = Node("node-7")
    need = node.need(MINUTE, "a", 1, T)
    assert need.reason == COLD
    assert [wanted.sequence for wanted in need.wanted] == [SEQUENCE, SEQUENCE - 1]
    assert {wanted.writer for wanted in need.wanted} == {"node-7"}
    assert [wanted.expires_at_ms for wanted in need.wanted] == [60_000 * 1003, 60_000 * 1002]
    assert [cell.sequence for cell in need.cells] == [SEQUENCE, SEQUENCE - 1]


def test_asking_for_a_read_counts_nothing() -> None:
    node = Node()
    for _ in range(5):
        node.need(MINUTE, "a", 1, T)
    assert node.cell(MINUTE, "a", SEQUENCE).own == 0
    assert (node.engine.allowed, node.engine.denied, node.engine.pending.dirty) == (0, 0, [])


def test_what_was_read_is_weighed_and_the_decision_says_where_it_comes_from() -> None:
    node = Node()
    need = node.need(MINUTE, "a", 1, T)
    node.origin_sync.apply_read(need, [OriginReply(3, 0), OriginReply(8, 0)], T + 20)
    decision = node.decide(MINUTE, "a", 1, T, ORIGIN)
    assert decision.effective == 3 + 4 + 1
    assert (decision.source, decision.regional_age_ms, decision.global_age_ms) == ("origin", 0, None)
    later = node.decide(MINUTE, "a", 0, T + 120)
    assert (later.source, later.regional_age_ms) == ("local", 100)
    assert node.engine.from_origin == 1


def test_a_limiter_without_an_origin_reads_nothing() -> None:
    for node in (Node(has_origin=False), Node(has_origin=False, has_ledger=True)):
        decision = node.decide(MINUTE, "a", 1, T)
        assert (decision.source, decision.regional_age_ms, decision.global_age_ms) == ("local", None, None)


def test_an_answer_for_a_subject_that_was_evicted_meanwhile_is_not_taken_as_known() -> None:
    node = Node(tuning=Tuning(subjects_max=1))
    first = node.need(MINUTE, "a", 1, T)
    node.need(MINUTE, "b", 1, T)
    again = node.need(MINUTE, "a", 1, T)
    assert again.subject is not first.subject, "evicted while it was read, and asked for again"
    node.origin_sync.apply_read(first, [OriginReply(10, 0), OriginReply(0, 0)], T + 20)
    decision = node.decide(MINUTE, "a", 0, T, ORIGIN)
    assert (decision.effective, decision.source) == (0, "degraded")
    decisions, _ = node.engine.decide_many([Request(MINUTE, "a", 0)], T, ORIGIN)
    assert decisions is not None and decisions[0].source == "degraded"
    node.origin_sync.apply_read(again, [OriginReply(10, 0), OriginReply(0, 0)], T + 30)
    assert node.decide(MINUTE, "a", 1, T, ORIGIN).source == "origin"


def test_an_item_of_a_batch_that_was_evicted_meanwhile_says_nothing_about_the_others() -> None:
    node = Node(tuning=Tuning(subjects_max=2))
    origin = DictOrigin()
    node.limit(MINUTE, "a", 1, T, origin)
    node.replay(origin, T)
    batch = [Request(MINUTE, "a", 1), Request(MINUTE, "b", 1)]
    _, needs = node.engine.decide_many(batch, T)
    node.need(MINUTE, "c", 1, T)
    node.read(needs, T, origin)
    assert not node.knows(MINUTE, "a")
    decisions, _ = node.engine.decide_many(batch, T, ORIGIN)
    assert decisions is not None
    assert [decision.source for decision in decisions] == ["degraded", "origin"]


def test_an_answer_about_the_current_cell_alone_does_not_make_the_previous_one_known() -> None:
    node, origin = Node(tuning=Tuning(subjects_max=1)), DictOrigin()
    node.need(MINUTE, "b", 0, T)
    node.decide(MINUTE, "a", 1, T, DEGRADED)
    node.replay(origin, T)
    assert node.decide(MINUTE, "a", 0, T, ORIGIN).source == "degraded"


# -- stale


def test_a_read_is_trusted_for_five_seconds_and_not_one_millisecond_longer() -> None:
    node = warmed()
    assert node.decide(MINUTE, "a", 0, T + 4_999).regional_age_ms == 4_999
    need = node.need(MINUTE, "a", 0, T + 5_000)
    assert need.reason == STALE
    assert [cell.sequence for cell in need.cells] == [SEQUENCE, SEQUENCE - 1]


def test_an_acknowledged_replay_makes_its_cell_fresh_as_a_read_does() -> None:
    node, origin = warmed(), DictOrigin()
    node.decide(MINUTE, "a", 1, T + 3_000)
    node.replay(origin, T + 3_100)
    assert node.decide(MINUTE, "a", 1, T + 8_099).regional_age_ms == 4_999
    node.replay(origin, T + 8_100)
    assert node.need(MINUTE, "a", 1, T + 13_100).reason == STALE


def test_a_failed_replay_makes_nothing_fresh() -> None:
    node = warmed()
    node.decide(MINUTE, "a", 1, T)
    replay = node.origin_sync.plan_replay(T + 4_000, 10)
    assert replay is not None
    node.origin_sync.fail_replay(replay)
    assert node.need(MINUTE, "a", 1, T + 5_000).reason == STALE


def test_an_import_does_not_make_a_cell_fresh() -> None:
    node = Node(has_ledger=True)
    rows = [
        LedgerRow("default", "default", "a", 60_000, SEQUENCE, region, 3, 60_000 * 1002)
        for region in ("fra", "iad")
    ]
    node.ledger_sync.apply_import(rows, T)
    assert node.need(MINUTE, "a", 1, T).reason == COLD


# -- local denial


def test_a_local_denial_needs_no_read_whatever_the_state_of_the_cell() -> None:
    cold = Node()
    denial = cold.decide(MINUTE, "a", 11, T)
    assert not denial and denial.regional_age_ms is None

    stale = warmed(others=10)
    assert not stale.decide(MINUTE, "a", 1, T + 20_000)
    strict = warmed(others=10)
    for later_ms in (0, 1, 1_000):
        denial = strict.decide(MINUTE, "a", 1, T + later_ms)
        assert not denial and denial.source == "local"
    failed = Node()
    assert not failed.limit(Limit(1, duration_ms=60_000, namespace="default"), "a", 2, T)


# -- strict


def test_a_denied_subject_is_strict_until_one_duration_has_passed() -> None:
    limit = Limit(10, duration_ms=2_000, namespace="default")
    node, origin = warmed(limit, others=0), DictOrigin()
    node.decide(limit, "a", 10, T)
    assert not node.decide(limit, "a", 1, T + 100)
    node.replay(origin, T + 1_900)
    # Strict although fresh, across the rollover at T + 2000, up to the denial plus one duration.
    need = node.need(limit, "a", 0, T + 1_950)
    assert need.reason == STRICT
    node.origin_sync.apply_read(need, origin.read(need.wanted), T + 1_950)
    assert node.need(limit, "a", 0, T + 2_099).reason == STRICT
    assert node.decide(limit, "a", 0, T + 2_100)


def test_strict_refreshes_the_current_cell_only_and_for_every_decision() -> None:
    node = warmed(others=9)
    assert not node.decide(MINUTE, "a", 2, T)
    for later_ms in (1, 2):
        need = node.need(MINUTE, "a", 1, T + later_ms)
        assert (need.reason, [cell.sequence for cell in need.cells]) == (STRICT, [SEQUENCE])
        node.origin_sync.apply_read(need, [OriginReply(9, 0)], T + later_ms)
    assert node.decide(MINUTE, "a", 1, T + 2, ORIGIN).source == "origin"


def test_a_strict_subject_that_is_stale_too_reads_both_cells() -> None:
    node = warmed(others=9)
    assert not node.decide(MINUTE, "a", 2, T)
    assert node.need(MINUTE, "a", 1, T + 5_000).reason == STALE


def test_a_later_denial_extends_strictness_and_an_earlier_one_never_shortens_it() -> None:
    node = warmed(others=10)
    node.decide(MINUTE, "a", 1, T)
    subject = node.subject(MINUTE, "a")
    assert subject.strict_until_ms == T + 60_000
    node.decide(MINUTE, "a", 1, T + 500)
    assert subject.strict_until_ms == T + 60_500
    node.decide(MINUTE, "a", 1, T - 20_000)
    assert subject.strict_until_ms == T + 60_500
    assert node.engine.strict_activations == 1


def test_a_denial_after_strictness_has_ended_is_a_new_activation() -> None:
    node = warmed(others=10)
    for later_ms, activations in ((0, 1), (1, 1), (60_000, 1), (120_000, 2), (240_000, 3)):
        node.decide(MINUTE, "a", 11, T + later_ms)
        assert node.engine.strict_activations == activations


def test_strictness_belongs_to_one_subject() -> None:
    node = warmed(others=10)
    assert not node.decide(MINUTE, "a", 1, T)
    need = node.need(MINUTE, "b", 1, T)
    node.origin_sync.apply_read(need, [OriginReply(0, 0), OriginReply(0, 0)], T)
    assert node.decide(MINUTE, "b", 1, T + 1)


# -- rollover


def test_a_cell_that_begins_while_its_subject_is_warm_needs_no_read_for_the_grace() -> None:
    start_ms = 60_000 * (SEQUENCE + 1)
    node = warmed(at_ms=start_ms - 4_999)
    decision = node.decide(MINUTE, "a", 1, start_ms)
    assert (decision.source, decision.regional_age_ms) == ("local", 0)
    assert node.decide(MINUTE, "a", 1, start_ms + 999).regional_age_ms == 999
    assert node.need(MINUTE, "a", 1, start_ms + 1_000).reason == STALE


def test_a_cell_that_begins_after_its_subject_went_stale_is_cold() -> None:
    start_ms = 60_000 * (SEQUENCE + 1)
    node = warmed(at_ms=start_ms - 5_000)
    assert node.need(MINUTE, "a", 1, start_ms).reason == COLD


def test_the_grace_counts_from_the_start_of_the_cell_not_from_its_first_request() -> None:
    start_ms = 60_000 * (SEQUENCE + 1)
    node = warmed(at_ms=start_ms - 1)
    assert node.need(MINUTE, "a", 1, start_ms + 1_000).reason == STALE


def test_a_subject_without_requests_for_a_whole_cell_is_cold() -> None:
    node = warmed(Limit(10, duration_ms=1_000, namespace="default"))
    assert node.need(Limit(10, duration_ms=1_000, namespace="default"), "a", 1, T + 2_000).reason == COLD


def test_a_grace_follows_an_answer_and_never_another_grace() -> None:
    """Otherwise, with windows of a second, every cell would count as warm, and a dead origin would never be asked."""
    second = Limit(10, duration_ms=1_000, namespace="default")
    node = warmed(second, at_ms=T + 500)
    assert node.decide(second, "a", 1, T + 1_000).source == "local"
    assert node.need(second, "a", 1, T + 2_000).reason == COLD


def test_a_cell_that_an_import_made_first_has_the_same_grace() -> None:
    node = Node(has_ledger=True)
    start_ms = 60_000 * (SEQUENCE + 1)
    need = node.need(MINUTE, "a", 0, start_ms - 10)
    node.origin_sync.apply_read(need, [OriginReply(0, 0), OriginReply(0, 0)], start_ms - 10)
    row = LedgerRow("default", "default", "a", 60_000, SEQUENCE + 1, "iad", 3, 60_000 * (SEQUENCE + 3))
    node.ledger_sync.apply_import([row], start_ms + 100)
    assert node.decide(MINUTE, "a", 1, start_ms + 999).effective == 4
    assert node.need(MINUTE, "a", 1, start_ms + 1_000).reason == STALE


# -- failed reads


def test_after_a_failed_read_memory_decides_and_the_next_try_waits_300_ms() -> None:
    node = Node()
    need = node.need(MINUTE, "a", 1, T)
    node.origin_sync.apply_read_failure(need, T + 300)
    decision = node.decide(MINUTE, "a", 1, T, DEGRADED)
    assert (decision.allowed, decision.source, decision.regional_age_ms) == (True, "degraded", None)
    assert node.decide(MINUTE, "a", 1, T + 599).source == "degraded"
    assert node.need(MINUTE, "a", 1, T + 600).reason == COLD
    assert node.engine.from_degraded == 2


def test_a_failed_read_of_a_strict_subject_pauses_strict_reads_too() -> None:
    node = warmed(others=9)
    assert not node.decide(MINUTE, "a", 2, T)
    node.origin_sync.apply_read_failure(node.need(MINUTE, "a", 1, T + 10), T + 10)
    assert node.decide(MINUTE, "a", 0, T + 309).source == "degraded"
    assert node.need(MINUTE, "a", 0, T + 310).reason == STRICT


def test_a_failed_read_shortens_no_freshness_and_adds_none() -> None:
    node = warmed()
    need = node.need(MINUTE, "a", 1, T + 5_000)
    node.origin_sync.apply_read_failure(need, T + 5_000)
    node.origin_sync.apply_read_failure(need, T + 4_000)
    assert node.decide(MINUTE, "a", 0, T + 5_299).source == "degraded"
    assert node.need(MINUTE, "a", 0, T + 5_300).reason == STALE

    fresh = warmed()
    subject = fresh.subject(MINUTE, "a")
    key = fresh.engine.subjects.key_of(subject)
    late_failure = Need(STALE, subject, [fresh.cell(MINUTE, "a", SEQUENCE)], key, "n1")
    fresh.origin_sync.apply_read_failure(late_failure, T)
    assert fresh.need(MINUTE, "a", 0, T + 5_000).reason == STALE


def test_the_pause_after_a_failed_read_survives_a_rollover() -> None:
    second = Limit(10, duration_ms=1_000, namespace="default")
    node = Node()
    node.origin_sync.apply_read_failure(node.need(second, "a", 1, T + 900), T + 900)
    decision = node.decide(second, "a", 1, T + 1_199)
    assert decision.source == "degraded"
    assert node.need(second, "a", 1, T + 1_200).reason == COLD


def test_a_decision_is_local_again_once_the_origin_has_answered_after_a_failed_read() -> None:
    node, origin = warmed(), DictOrigin()
    node.limit(MINUTE, "a", 1, T + 6_000)
    assert node.decide(MINUTE, "a", 1, T + 6_050).source == "degraded"
    node.replay(origin, T + 6_100)
    assert node.decide(MINUTE, "a", 1, T + 6_101).source == "local"


def test_a_decision_is_degraded_until_the_previous_cell_was_answered_too() -> None:
    node, origin = Node(), DictOrigin()
    node.limit(MINUTE, "a", 1, T)
    assert node.decide(MINUTE, "a", 1, T + 50).source == "degraded"
    node.replay(origin, T + 100)
    assert node.decide(MINUTE, "a", 1, T + 101).source == "degraded"
    assert node.limit(MINUTE, "a", 1, T + 301, origin).source == "origin"


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), min_size=1, max_size=30))
def test_a_dead_origin_is_asked_at_most_once_in_300_ms_for_one_subject(
    requests: list[tuple[int, bool]],
) -> None:
    second = Limit(1_000, duration_ms=1_000, namespace="default")
    node = Node()
    now_ms = T
    asked: list[int] = []
    for pause_ms, denied in requests:
        now_ms += pause_ms
        answer = node.engine.decide(second, "a", 2_000 if denied else 1, now_ms)
        if isinstance(answer, Need):
            asked.append(now_ms)
            node.origin_sync.apply_read_failure(answer, now_ms)
        else:
            assert isinstance(answer, Decision)
            assert answer.allowed != denied
            assert denied or answer.source == "degraded"
    assert all(later - earlier >= 300 for earlier, later in pairwise(asked))


# -- ages


def test_the_global_age_is_that_of_the_last_complete_import() -> None:
    node = Node(has_origin=False, has_ledger=True)
    assert node.decide(MINUTE, "a", 1, T).global_age_ms is None
    node.ledger_sync.finish_import(T - 250)
    assert node.decide(MINUTE, "a", 1, T).global_age_ms == 250
    assert node.decide(MINUTE, "a", 100, T).global_age_ms == 250, "a denial reports it too"
    node.ledger_sync.finish_import(T - 300)
    assert node.decide(MINUTE, "a", 1, T).global_age_ms == 250, "an older answer makes nothing older"
    assert node.decide(MINUTE, "a", 1, T - 1_000).global_age_ms == 0, "no age is negative"


@pytest.mark.parametrize(("fresh_ms", "grace_ms", "retry_ms"), [(1_000, 10, 50), (7, 3, 2)])
def test_the_spans_come_from_the_tuning(fresh_ms: int, grace_ms: int, retry_ms: int) -> None:
    tuning = Tuning(fresh_ms=fresh_ms, rollover_grace_ms=grace_ms, read_retry_ms=retry_ms)
    node = Node(tuning=tuning)
    start_ms = 60_000 * (SEQUENCE + 1)
    node.origin_sync.apply_read(
        node.need(MINUTE, "a", 0, start_ms - 2), [OriginReply(0, 0), OriginReply(0, 0)], start_ms - 2
    )
    assert node.decide(MINUTE, "a", 0, start_ms + grace_ms - 1)
    need = node.need(MINUTE, "a", 0, start_ms + grace_ms)
    node.origin_sync.apply_read_failure(need, start_ms + grace_ms)
    assert node.decide(MINUTE, "a", 0, start_ms + grace_ms + retry_ms - 1)
    need = node.need(MINUTE, "a", 0, start_ms + grace_ms + retry_ms)
    node.origin_sync.apply_read(need, [OriginReply(0, 0), OriginReply(0, 0)], start_ms + 100)
    assert isinstance(node.engine.decide(MINUTE, "a", 0, start_ms + 100 + fresh_ms - 1), Decision)
    assert isinstance(node.engine.decide(MINUTE, "a", 0, start_ms + 100 + fresh_ms), Need)


# -- a limit that denies during an outage

LOGIN = Limit(10, duration_ms=60_000, namespace="default", on_outage="deny")


def test_a_limit_may_deny_while_its_origin_does_not_answer_and_says_so_in_the_decision() -> None:
    node = Node()
    need = node.need(LOGIN, "a", 1, T)
    node.origin_sync.apply_read_failure(need, T + 40)
    denial = node.engine.decide(LOGIN, "a", 1, T + 50, DEGRADED)
    assert isinstance(denial, Decision)
    assert (denial.allowed, denial.remaining, denial.source) == (False, 0, "degraded")
    assert denial.retry_after_ms == PLAIN.read_retry_ms - 10, "when the origin is read again"
    # Until then no request reads, and every one is denied in the same way.
    again = node.engine.decide(LOGIN, "a", 1, T + 100)
    assert isinstance(again, Decision) and not again and again.source == "degraded"
    assert node.engine.decide(MINUTE, "a", 1, T + 100), "the same counter, decided from memory"
    assert node.engine.denied == 2 and node.engine.strict_activations == 0


def test_a_limit_that_denies_during_an_outage_decides_as_others_do_when_the_origin_answers() -> None:
    node = Node()
    origin = DictOrigin()
    assert node.limit(LOGIN, "a", 10, T, origin).source == "origin"
    assert not node.limit(LOGIN, "a", 1, T + 1, origin)
    fresh = node.limit(LOGIN, "b", 1, T, origin)
    assert fresh and node.limit(LOGIN, "b", 1, T + 1).source == "local", "fresh memory is no outage"


def test_one_item_that_may_not_be_decided_during_an_outage_denies_its_batch() -> None:
    node = Node()
    for need in node.engine.decide_many([(LOGIN, "a", 1), (MINUTE, "b", 1)], T)[1]:
        node.origin_sync.apply_read_failure(need, T)
    decisions, _ = node.engine.decide_many([(LOGIN, "a", 1), (MINUTE, "b", 1)], T + 1, DEGRADED)
    assert decisions is not None
    assert [decision.allowed for decision in decisions] == [False, True]
    assert node.engine.pending.dirty == [], "nothing was counted"


def test_an_embedded_limiter_has_no_outages() -> None:
    embedded = Engine(PLAIN, node_id="n")
    decision = embedded.decide(LOGIN, "a", 1, T, DEGRADED)
    assert isinstance(decision, Decision) and decision


# -- the previous cell


def test_what_a_neighbour_counted_last_in_the_previous_cell_is_read_although_the_current_one_is_fresh() -> (
    None
):
    """A node that has only peeked before the boundary must not admit a full quota after it."""
    limit = Limit(100, duration_ms=60_000, namespace="default")
    node, other, origin = Node("n1"), Node("n2"), DictOrigin()
    start_ms = T // 60_000 * 60_000 + 60_000
    node.limit(limit, "a", 0, start_ms - 2_000, origin)
    other.limit(limit, "a", 100, start_ms - 1_000, origin)
    allowed = 0
    for second in range(28):
        now_ms = start_ms + 1_000 * second
        allowed += 4 * node.limit(limit, "a", 4, now_ms, origin).allowed
        node.replay(origin, now_ms)
        if second == 1:
            other.replay(origin, now_ms)
    assert node.cell(limit, "a", start_ms // 60_000 - 1).others == 100
    assert allowed <= 50, "more than half of the previous cell still counts"


def test_a_late_replay_of_the_previous_cell_is_seen_while_replays_keep_the_current_one_fresh() -> None:
    limit = Limit(1_000, duration_ms=60_000, namespace="default")
    node, late, origin = Node("n1"), Node("n2"), DictOrigin()
    start_ms = T // 60_000 * 60_000 + 60_000
    late.limit(limit, "a", 500, start_ms - 1_000)
    node.limit(limit, "a", 10, start_ms - 1_000, origin)
    node.replay(origin, start_ms - 1_000)
    for second in range(30):
        node.limit(limit, "a", 1, start_ms + 1_000 * second, origin)
        node.replay(origin, start_ms + 1_000 * second)
        if second == 8:
            late.replay(origin, start_ms + 1_000 * second)
        if second >= 8 + 6:
            assert node.cell(limit, "a", start_ms // 60_000 - 1).others == 500


def test_replays_keep_the_previous_cell_fresh_without_a_read() -> None:
    limit = Limit(1_000, duration_ms=60_000, namespace="default")
    node, origin = Node(), DictOrigin()
    start_ms = T // 60_000 * 60_000 + 60_000
    node.limit(limit, "a", 10, start_ms - 1_000, origin)
    node.replay(origin, start_ms - 1_000)
    reads = origin.reads
    for second in range(50):
        node.limit(limit, "a", 1, start_ms + 1_000 * second, origin)
        node.replay(origin, start_ms + 1_000 * second)
    assert origin.reads == reads
