"""Replays of own counts to the origin: idempotent, lossless, coalesced, and repaired after a loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.nodes import DictOrigin, Node
from tidegate.core.cells import CLEAN, PINNED
from tidegate.core.model import DEGRADED, LOCAL, ORIGIN, Limit, OriginReply, Tuning, subject_digest
from tidegate.core.origin_sync import Replay

LIMIT = Limit(1_000, duration_ms=60_000, namespace="default")
T = 60_000 * 1000 + 30_000
DIGEST = subject_digest("default", "default", "a", 60_000)


def planned(node: Node, now_ms: int = T, cells_max: int = 250) -> Replay:
    replay = node.origin_sync.plan_replay(now_ms, cells_max)
    assert replay is not None
    return replay


# -- what is sent


def test_many_requests_cost_one_component() -> None:
    node, origin = Node("n7"), DictOrigin()
    for _ in range(100):
        node.limit(LIMIT, "a", 1, T, origin)
    replay = planned(node)
    assert [(c.digest, c.sequence, c.writer, c.own) for c in replay.components] == [(DIGEST, 1000, "n7", 100)]
    assert replay.components[0].expires_at_ms == 60_000 * 1003
    assert node.origin_sync.plan_replay(T, 250) is None, "it is on its way"


def test_the_first_dirty_cell_wakes_the_driver_and_the_others_are_sent_with_it() -> None:
    node, origin = Node(), DictOrigin()
    woken = []
    for cost in (0, 1, 1):
        node.engine.pending.is_urgent = False
        node.limit(LIMIT, "a", cost, T, origin)
        woken.append((node.engine.pending.is_urgent, bool(node.engine.pending.dirty)))
    assert woken == [(False, False), (True, True), (False, True)]


def test_cost_zero_and_denials_are_never_replayed() -> None:
    node, origin = Node(), DictOrigin()
    for identifier in ("a", "b"):
        node.limit(LIMIT, identifier, 0, T, origin)
        node.limit(LIMIT, identifier, 5_000, T, origin)
    assert node.engine.pending.dirty == []
    assert node.origin_sync.plan_replay(T, 250) is None
    assert origin.cells == {}


def test_dirty_cells_are_sent_in_the_order_in_which_they_became_dirty_in_bounded_commands() -> None:
    node, origin = Node(), DictOrigin()
    for i in range(10):
        node.limit(LIMIT, f"id{i}", 1, T, origin)
    sizes, order = [], []
    while (replay := node.origin_sync.plan_replay(T, 4)) is not None:
        sizes.append(len(replay.components))
        order += [subject.identifier for subject in replay.subjects]
    assert sizes == [4, 4, 2]
    assert order == [f"id{i}" for i in range(10)]


def test_all_unacknowledged_cells_of_a_subject_are_sent_together() -> None:
    node = Node()
    node.limit(LIMIT, "a", 1, T - 60_000)
    node.limit(LIMIT, "a", 2, T)
    assert sorted((c.sequence, c.own) for c in planned(node).components) == [(999, 1), (1000, 2)]


def test_aged_out_cells_are_not_replayed_and_hold_nothing_in_memory() -> None:
    node = Node()
    node.limit(LIMIT, "a", 1, T)
    assert node.origin_sync.plan_replay(60_000 * 1003, 10) is None
    assert node.subject(LIMIT, "a").queue == CLEAN
    node.limit(LIMIT, "b", 1, T)
    assert [c.sequence for c in planned(node, 60_000 * 1003 - 1).components] == [1000]


# -- answers


def test_the_answer_to_a_replay_has_the_counts_of_others() -> None:
    node, peer, origin = Node("n1"), Node("n2"), DictOrigin()
    peer.limit(LIMIT, "a", 30, T, origin)
    peer.replay(origin, T)
    node.limit(LIMIT, "a", 5, T)
    node.replay(origin, T)
    cell = node.cell(LIMIT, "a", 1000)
    assert (cell.own, cell.others) == (5, 30)
    assert (cell.regional(), cell.total()) == (35, 35)


def test_counts_in_flight_are_neither_lost_nor_counted_twice() -> None:
    node, origin = Node(), DictOrigin()
    node.limit(LIMIT, "a", 5, T, origin)
    in_flight = planned(node)
    answers = origin.merge(in_flight.components)
    node.decide(LIMIT, "a", 2, T)
    need = node.need(LIMIT, "a", 0, T + 6_000)
    node.origin_sync.apply_read(need, origin.read(need.wanted), T + 6_000)
    assert node.cell(LIMIT, "a", 1000).total() == 7
    node.origin_sync.apply_replay(in_flight, answers, T)
    assert node.cell(LIMIT, "a", 1000).total() == 7
    assert [c.own for c in planned(node).components] == [7]


def test_a_replay_that_timed_out_but_arrived_is_harmless_when_sent_again() -> None:
    node, origin = Node(), DictOrigin()
    node.limit(LIMIT, "a", 5, T, origin)
    lost_answer = planned(node)
    origin.merge(lost_answer.components)
    node.origin_sync.fail_replay(lost_answer)
    assert node.replay(origin, T) == 1
    assert origin.total(DIGEST, 1000) == 5
    assert node.cell(LIMIT, "a", 1000).total() == 5


def test_what_is_not_acknowledged_stays_for_as_long_as_the_outage_lasts() -> None:
    node, origin = Node(), DictOrigin()
    node.limit(LIMIT, "a", 1, T, origin)
    for i in range(50):
        node.origin_sync.fail_replay(planned(node))
        node.limit(LIMIT, "a", 1, T + i * 400)
    assert node.replay(origin, T + 20_000) == 1
    assert origin.total(DIGEST, 1000) == 51


@given(st.lists(st.sampled_from(["accept", "arrive", "answer", "fail"]), max_size=30))
def test_at_rest_the_origin_holds_exactly_what_was_accepted(events: list[str]) -> None:
    """Replays overlap, arrive without an answer, are answered late, fail and are repeated."""
    node, origin = Node(), DictOrigin()
    accepted = 0
    flying: list[Replay] = []
    answers: list[tuple[Replay, list[OriginReply]]] = []
    for event in events:
        if event == "accept":
            node.decide(LIMIT, "a", 1, T, DEGRADED)
            accepted += 1
            replay = node.origin_sync.plan_replay(T, 10)
            if replay is not None:
                flying.append(replay)
        elif event == "arrive" and flying:
            replay = flying.pop()
            answers.append((replay, origin.merge(replay.components)))
        elif event == "answer" and answers:
            replay, replies = answers.pop(0)
            node.origin_sync.apply_replay(replay, replies, T)
        elif event == "fail" and flying:
            node.origin_sync.fail_replay(flying.pop(0))
    for replay, replies in answers:
        node.origin_sync.apply_replay(replay, replies, T)
    for replay in flying:
        node.origin_sync.fail_replay(replay)
    assert not node.sweep.is_active, "overtaking is not a sign of a wipe"
    node.replay(origin, T)
    assert origin.total(DIGEST, 1000) == accepted
    if accepted:
        cell = node.cell(LIMIT, "a", 1000)
        assert (cell.own, cell.others) == (accepted, 0)
        assert node.subject(LIMIT, "a").queue == CLEAN


def test_a_node_that_only_replays_learns_the_last_counts_of_the_window_before() -> None:
    """Its replays keep the current cell fresh, so that no read would ever happen."""
    node, peer, origin = Node("n1"), Node("n2"), DictOrigin()
    start_ms = 60_000 * 1001
    node.limit(LIMIT, "a", 5, start_ms - 3_000, origin)
    node.replay(origin, start_ms - 3_000)
    peer.limit(LIMIT, "a", 400, start_ms - 2_000, origin)
    peer.replay(origin, start_ms - 2_000)
    for second in range(10):
        assert node.limit(LIMIT, "a", 1, start_ms + second * 900, origin)
        node.replay(origin, start_ms + second * 900)
    assert node.cell(LIMIT, "a", 1000).total() == 405
    reads = origin.reads
    node.limit(LIMIT, "a", 1, start_ms + 9_000, origin)
    assert origin.reads == reads
    # It is sent once, not with every replay.
    node.limit(LIMIT, "a", 1, start_ms + 9_100, origin)
    assert [c.sequence for c in planned(node, start_ms + 9_100).components] == [1001]


# -- a wiped or older origin


def test_a_wiped_origin_is_noticed_by_a_replay_and_everything_is_merged_again() -> None:
    node, origin = Node(), DictOrigin()
    for i in range(20):
        node.limit(LIMIT, f"id{i}", i + 1, T, origin)
    node.replay(origin, T)
    full = origin.copy()
    origin.cells.clear()
    node.limit(LIMIT, "id0", 1, T, origin)
    node.replay(origin, T)
    assert node.sweep.is_active
    node.run_sweep(7)
    node.replay(origin, T)
    full[subject_digest("default", "default", "id0", 60_000), 1000]["n1"] += 1
    assert origin.cells == full
    assert node.sweep.heals == 20
    assert not node.sweep.is_active


def test_a_wiped_origin_is_noticed_by_a_read() -> None:
    node, origin = Node(), DictOrigin()
    node.limit(LIMIT, "a", 5, T, origin)
    node.replay(origin, T)
    origin.cells.clear()
    node.limit(LIMIT, "a", 0, T + 6_000, origin)
    assert node.sweep.is_active and node.engine.pending.dirty
    node.replay(origin, T + 6_000)
    assert origin.total(DIGEST, 1000) == 5


def test_a_failover_to_an_older_copy_heals_and_views_never_fall() -> None:
    node, peer, origin = Node("n1"), Node("n2"), DictOrigin()
    node.limit(LIMIT, "a", 5, T, origin)
    node.replay(origin, T)
    older = origin.copy()
    peer.limit(LIMIT, "a", 7, T, origin)
    peer.replay(origin, T)
    node.limit(LIMIT, "a", 1, T, origin)
    node.replay(origin, T)
    assert node.cell(LIMIT, "a", 1000).total() == 13
    origin.cells = older
    for one in (node, peer):
        one.limit(LIMIT, "a", 0, T + 6_000, origin)
        assert one.cell(LIMIT, "a", 1000).total() >= 12
        one.run_sweep()
        one.replay(origin, T + 6_000)
    assert origin.total(DIGEST, 1000) == 13


def test_a_replay_in_flight_during_a_wipe_is_not_counted_as_all_that_was_lost() -> None:
    node, origin = Node(), DictOrigin()
    node.limit(LIMIT, "a", 5, T, origin)
    node.replay(origin, T)
    node.limit(LIMIT, "a", 2, T, origin)
    in_flight = planned(node)
    origin.cells.clear()
    node.origin_sync.apply_replay(in_flight, origin.merge(in_flight.components), T)
    node.run_sweep()
    node.replay(origin, T)
    assert origin.total(DIGEST, 1000) == 7


def test_counts_that_the_origin_lost_are_pinned_at_once() -> None:
    """Memory may run short before the sweep reaches them: they are unreplayed again, and must not be evicted first."""
    node, origin = Node(tuning=Tuning(subjects_max=2)), DictOrigin()
    node.limit(LIMIT, "a", 5, T, origin)
    node.replay(origin, T)
    origin.cells.clear()
    node.limit(LIMIT, "a", 0, T + 6_000, origin)
    assert node.subject(LIMIT, "a").queue == PINNED
    for i in range(5):
        node.limit(LIMIT, f"other{i}", 0, T + 20_000 + i, origin)
    assert node.knows(LIMIT, "a")


def test_a_sweep_goes_in_slices_and_can_be_joined_by_another() -> None:
    node, origin = Node(), DictOrigin()
    for i in range(10):
        node.limit(LIMIT, f"id{i}", 1, T, origin)
    node.replay(origin, T)
    node.sweep.start_heal()
    assert node.sweep.run(4)
    assert len(node.engine.pending.dirty) == 4
    assert node.sweep.run(4)
    node.sweep.start_heal()
    slices = 0
    while node.sweep.run(4):
        slices += 1
    assert slices == 2
    assert len(node.engine.pending.dirty) == 10
    assert not node.sweep.run(4)


# -- healing is limited in rate


def test_an_origin_that_evicts_cells_is_not_sent_everything_each_time() -> None:
    """Every read shows a loss: its cell is merged again, and all others only after longer and longer pauses."""
    node, origin = Node(), DictOrigin()
    for number in range(200):
        node.limit(LIMIT, f"id{number}", 1, T, origin)
    node.replay(origin, T)
    sent = 0
    for second in range(6, 30):
        for number in range(10):
            digest = subject_digest("default", "default", f"id{number}", LIMIT.duration_ms)
            origin.cells.pop((digest, T // LIMIT.duration_ms), None)
            node.limit(LIMIT, f"id{number}", 0, T + 1_000 * second + number, origin)
        node.sweep.resume(T + 1_000 * second + 10)
        node.run_sweep()
        sent += node.replay(origin, T + 1_000 * second + 20)
    reads = 24 * 10
    assert sent <= reads + 6 * 200, "24 rounds, but only about log2 of them merge all 200 cells again"
    for number in range(10):
        node.limit(LIMIT, f"id{number}", 0, T + 36_000, origin)
    node.replay(origin, T + 36_000)
    assert sum(sum(held.values()) for held in origin.cells.values()) == 200


def test_a_cell_that_the_clock_of_the_origin_has_aged_out_is_not_a_loss() -> None:
    second = Limit(10, duration_ms=1_000, namespace="default")
    node, origin = Node(), DictOrigin()
    node.sweep.origin_ahead_ms = 3_500
    node.limit(second, "a", 1, T, origin)
    for _ in range(5):
        node.replay(origin, T)
        origin.cells.clear()
        node.limit(second, "a", 1, T, origin)
    assert node.sweep.heals == 0 and not node.sweep.is_active


def test_a_loss_in_the_pause_after_a_heal_is_healed_after_it() -> None:
    node, origin = Node(), DictOrigin()
    for identifier in "abc":
        node.limit(LIMIT, identifier, 1, T, origin)
    node.replay(origin, T)
    for later_ms in (6_000, 6_500):
        origin.cells.clear()
        node.limit(LIMIT, "a", 1, T + later_ms, origin)
        node.replay(origin, T + later_ms)
        node.run_sweep()
        node.replay(origin, T + later_ms)
    assert len(origin.cells) < 3
    assert not node.sweep.resume(T + 6_999)
    assert node.sweep.resume(T + 7_000)
    node.run_sweep()
    node.replay(origin, T + 7_000)
    assert len(origin.cells) == 3


# -- two lives of one subject


def test_an_evicted_subject_that_comes_back_counts_its_earlier_part_in_full() -> None:
    node, origin = Node(tuning=Tuning(subjects_max=1)), DictOrigin()
    for life in range(1, 5):
        node.limit(LIMIT, "a", 10, T, origin)
        node.replay(origin, T)
        assert node.limit(LIMIT, "a", 0, T, origin).effective == 10 * life
        node.limit(LIMIT, "b", 0, T, origin)
        assert not node.knows(LIMIT, "a")
    assert origin.total(DIGEST, 1000) == 40
    assert len(origin.cells[DIGEST, 1000]) == 4, "each life is a component of its own"


def test_a_replay_from_before_an_eviction_that_arrives_late_still_counts() -> None:
    node, origin = Node(tuning=Tuning(subjects_max=1)), DictOrigin()
    node.limit(LIMIT, "a", 10, T, origin)
    late = planned(node)
    node.limit(LIMIT, "b", 1, T, origin)
    assert node.engine.subjects.evicted_unreplayed == 1
    node.limit(LIMIT, "a", 5, T, origin)
    node.replay(origin, T)
    node.origin_sync.apply_replay(late, origin.merge(late.components), T)
    node.origin_sync.fail_replay(late)
    node.replay(origin, T)
    assert origin.total(DIGEST, 1000) == 15


@pytest.mark.parametrize("reads", [True, False])
def test_a_subject_that_expired_before_the_clock_stepped_back_counts_in_full(reads: bool) -> None:
    """A clock that runs an hour ahead makes everything age out; then it steps back, into the same cells."""
    node, origin = Node(), DictOrigin()
    node.limit(LIMIT, "a", 10, T, origin)
    node.replay(origin, T)
    assert not node.engine.subjects.expire(T + 3_600_000, 10)
    assert not node.knows(LIMIT, "a")
    node.decide(LIMIT, "a", 3, T, LOCAL if reads and node.limit(LIMIT, "a", 0, T, origin) else DEGRADED)
    node.replay(origin, T)
    assert origin.total(DIGEST, 1000) == 13
    assert node.decide(LIMIT, "a", 0, T, ORIGIN).effective == 13
    assert node.cell(LIMIT, "a", 1000).others == 0


def test_a_cell_that_aged_out_before_the_clock_stepped_back_counts_in_full() -> None:
    node, origin = Node(), DictOrigin()
    for sequence in range(1000, 1005):
        node.limit(LIMIT, "a", 10, 60_000 * sequence + 30_000, origin)
        node.replay(origin, 60_000 * sequence + 30_000)
    assert node.subject(LIMIT, "a").cell(1000) is None
    assert node.limit(LIMIT, "a", 3, T, origin).effective == 13
    node.replay(origin, T)
    assert origin.total(DIGEST, 1000) == 13
