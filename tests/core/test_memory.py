"""The memory bound: which subject is evicted first, which are protected, and how subjects expire."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.nodes import DictLedger, DictOrigin, Node
from tidegate.core.cells import BLOCKED, CLEAN, PINNED
from tidegate.core.model import DEGRADED, Limit, Tuning
from tidegate.core.subjects import LIST_MAX
from tidegate.core.table import Table

SECOND = Limit(10, duration_ms=1_000, namespace="default")
MINUTE = Limit(10, duration_ms=60_000, namespace="default")
DAY = Limit(10, duration_ms=86_400_000, namespace="default")
T = 86_400_000 * 20_000


def bounded(subjects_max: int, *, has_origin: bool = False) -> Node:
    return Node(has_origin=has_origin, tuning=Tuning(subjects_max=subjects_max, touch_ms=1))


def known(node: Node, limit: Limit, identifiers: str) -> str:
    return "".join(identifier for identifier in identifiers if node.knows(limit, identifier))


# -- which subject is evicted first


def test_the_least_recently_used_subject_is_evicted_first() -> None:
    node = bounded(3)
    for later_ms, identifier in enumerate("abcabd"):
        node.decide(DAY, identifier, 1, T + later_ms)
    assert known(node, DAY, "abcd") == "abd"
    assert node.engine.subjects.evicted_clean == 1


def test_recency_is_exact_to_the_touch_time() -> None:
    node = Node(has_origin=False, tuning=Tuning(subjects_max=2, touch_ms=1_000))
    for later_ms, identifier in ((0, "a"), (1, "b"), (999, "a"), (1_000, "c")):
        node.decide(DAY, identifier, 1, T + later_ms)
    assert known(node, DAY, "abc") == "bc", "a use within the touch time changes nothing"
    for later_ms, identifier in ((2_000, "b"), (2_001, "d")):
        node.decide(DAY, identifier, 1, T + later_ms)
    assert known(node, DAY, "bcd") == "bd"


def test_denied_subjects_are_evicted_last() -> None:
    node = bounded(3)
    assert not node.decide(DAY, "x", 11, T)
    for later_ms, identifier in enumerate("abcdef", 1):
        node.decide(DAY, identifier, 1, T + later_ms)
    assert known(node, DAY, "xabcdef") == "xef"
    assert node.engine.subjects.evicted_blocked == 0


def test_a_denied_subject_is_evicted_when_only_denied_ones_are_left_and_it_is_counted() -> None:
    node = bounded(2)
    for later_ms, identifier in enumerate("abc"):
        assert not node.decide(DAY, identifier, 11, T + later_ms)
    assert known(node, DAY, "abc") == "bc"
    assert node.engine.subjects.evicted_blocked == 1


def test_a_denial_that_has_ended_protects_no_subject() -> None:
    node = bounded(2)
    node.decide(SECOND, "x", 11, T)
    node.decide(SECOND, "a", 1, T + 500)
    node.decide(SECOND, "b", 1, T + 1_000)
    assert known(node, SECOND, "xab") == "ab"
    assert node.engine.subjects.evicted_clean == 1


def test_denied_subjects_are_evicted_first_while_they_are_more_than_half() -> None:
    node = bounded(8)
    for number in range(8):
        assert not node.decide(DAY, f"denied{number}", 11, T + number)
    for later_ms, identifier in enumerate("abcdef", 10):
        node.decide(DAY, identifier, 1, T + later_ms)
    assert known(node, DAY, "abcdef") == "cdef", "from half of the memory on, the usual order holds"
    assert [node.knows(DAY, f"denied{number}") for number in range(8)] == [False] * 4 + [True] * 4


def test_a_memory_full_of_denied_subjects_does_not_switch_the_limiter_off() -> None:
    """An attacker fills it with subjects that are denied for 30 days, and sends requests of one identifier in
    between."""
    month = Limit(10, duration_ms=30 * 86_400_000, namespace="default")
    node = bounded(100)
    for number in range(200):
        node.decide(month, f"denied{number}", 11, T + number)
    allowed = 0
    for number in range(500):
        allowed += node.decide(month, "target", 1, T + 1_000 + 10 * number).allowed
        for other in range(5):
            node.decide(month, f"new{number}-{other}", 1, T + 1_001 + 10 * number + other)
    assert allowed == 10


@given(st.integers(1, 60), st.integers(0, 12))
def test_pressure_costs_the_namespace_that_causes_it(spray: int, cost: int) -> None:
    """However many identifiers one namespace uses, allowed or denied, the subjects of a smaller one stay."""
    node = bounded(20)
    others = Limit(10, duration_ms=86_400_000, namespace="others")
    for identifier in "abcdefghi":
        node.decide(others, identifier, 10, T)
    for number in range(spray):
        node.decide(DAY, f"spray{number}", cost, T + 1 + number)
    assert not any(node.decide(others, identifier, 1, T + 100) for identifier in "abcdefghi")


def test_unreplayed_counts_of_a_spray_are_evicted_before_the_subjects_of_others() -> None:
    node, origin = bounded(20, has_origin=True), DictOrigin()
    others = Limit(10, duration_ms=86_400_000, namespace="others")
    for identifier in "abcdefghi":
        node.limit(others, identifier, 10, T, origin)
    node.replay(origin, T)
    for number in range(50):
        node.decide(DAY, f"spray{number}", 1, T + 1 + number, DEGRADED)
    assert known(node, others, "abcdefghi") == "abcdefghi"
    assert node.engine.subjects.evicted_unreplayed == 50 - 11


def test_a_denied_subject_that_is_allowed_again_is_like_any_other() -> None:
    node = bounded(2)
    node.decide(SECOND, "x", 11, T)
    assert node.subject(SECOND, "x").queue == BLOCKED
    node.decide(SECOND, "x", 1, T + 1_000)
    assert node.subject(SECOND, "x").queue == CLEAN


def test_unreplayed_counts_stay_while_anything_else_can_be_evicted() -> None:
    node = bounded(3, has_origin=True)
    node.decide(DAY, "u", 1, T, DEGRADED)
    assert node.subject(DAY, "u").queue == PINNED
    assert not node.decide(DAY, "blocked", 11, T + 1)
    for later_ms, identifier in enumerate("abcd", 2):
        node.decide(DAY, identifier, 0, T + later_ms, DEGRADED)
    assert node.knows(DAY, "u") and node.knows(DAY, "blocked")
    for later_ms, identifier in enumerate("vw", 20):
        node.decide(DAY, identifier, 1, T + later_ms, DEGRADED)
    assert not node.knows(DAY, "blocked"), "the blocked one is evicted before unreplayed counts"
    assert known(node, DAY, "uvw") == "uvw"
    assert node.engine.subjects.evicted_unreplayed == 0
    node.decide(DAY, "y", 1, T + 30, DEGRADED)
    assert known(node, DAY, "uvwy") == "vwy"
    assert node.engine.subjects.evicted_unreplayed == 1


def test_acknowledged_counts_may_be_evicted_and_the_origin_gives_them_back() -> None:
    node, origin = bounded(1, has_origin=True), DictOrigin()
    node.limit(DAY, "a", 7, T, origin)
    node.replay(origin, T)
    assert node.subject(DAY, "a").queue == CLEAN
    node.limit(DAY, "b", 1, T, origin)
    node.replay(origin, T)
    assert not node.knows(DAY, "a")
    assert not node.limit(DAY, "a", 4, T, origin)
    assert node.limit(DAY, "a", 3, T, origin).effective == 10


def test_a_denied_subject_is_blocked_again_once_its_counts_are_acknowledged() -> None:
    node, origin = bounded(10, has_origin=True), DictOrigin()
    node.limit(DAY, "a", 10, T, origin)
    node.limit(DAY, "a", 1, T, origin)
    assert node.subject(DAY, "a").queue == PINNED
    node.replay(origin, T)
    assert node.subject(DAY, "a").queue == BLOCKED


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 3)), max_size=60))
@settings(max_examples=60)
def test_the_bound_is_kept_after_every_decision(uses: list[tuple[int, int, int]]) -> None:
    node = bounded(4, has_origin=True)
    now_ms = T
    for identifier, cost, pause_ms in uses:
        now_ms += pause_ms
        node.decide(DAY, f"id{identifier}", cost, now_ms, DEGRADED)
        assert node.engine.subjects.count <= 4
        assert node.knows(DAY, f"id{identifier}"), "the subject that was just decided is never evicted"


# -- expiry


def test_a_subject_expires_when_its_newest_cell_has_aged_out() -> None:
    node = Node(has_origin=False)
    node.decide(MINUTE, "a", 1, T)
    subjects = node.engine.subjects
    aged_out_ms = T + 3 * 60_000
    subjects.expire(aged_out_ms - 1, 100)
    assert subjects.count == 1
    # Checked together with others of the same time span, a few seconds later.
    subjects.expire(aged_out_ms + 2 * 16_384, 100)
    assert (subjects.count, subjects.expired) == (0, 1)


def test_a_cell_is_kept_until_three_durations_after_its_start() -> None:
    """It no longer counts in any decision, but may still have to be replayed."""
    node = bounded(10, has_origin=True)
    sequence = T // 60_000
    for minute in (0, 1, 3):
        node.decide(MINUTE, "a", 1, T + minute * 60_000, DEGRADED)
    node.engine.subjects.expire(T + 4 * 60_000 - 1, 100)
    kept = sorted(cell.sequence - sequence for cell in node.subject(MINUTE, "a").cells())
    assert kept == [1, 3]
    replay = node.origin_sync.plan_replay(T + 4 * 60_000 - 1, 10)
    assert replay is not None
    assert sorted(component.sequence - sequence for component in replay.components) == [1, 3]


def test_a_subject_with_a_newer_cell_is_only_checked_again_later() -> None:
    node = Node(has_origin=False)
    for minute in range(20):
        node.decide(MINUTE, "a", 1, T + minute * 60_000)
        node.engine.subjects.expire(T + minute * 60_000, 100)
        assert node.knows(MINUTE, "a")
        assert len(node.subject(MINUTE, "a").cells()) <= 3
    node.engine.subjects.expire(T + 60 * 60_000, 100)
    assert not node.knows(MINUTE, "a")


def test_expiry_checks_no_more_subjects_than_it_is_asked_to() -> None:
    node = Node(has_origin=False)
    for i in range(100):
        node.decide(SECOND, f"id{i}", 1, T)
    subjects = node.engine.subjects
    for looked in range(10, 100, 10):
        assert subjects.expire(T + 60_000, 10)
        assert (subjects.expired, subjects.count) == (looked, 100 - looked)
    assert not subjects.expire(T + 60_000, 11)
    assert subjects.count == 0


def test_expiry_that_finds_all_subjects_alive_checks_no_more_than_it_is_asked_to_either() -> None:
    node = Node(has_origin=False)
    for i in range(100):
        node.decide(SECOND, f"id{i}", 1, T)
    later_ms = T + 60_000
    for i in range(100):
        node.decide(SECOND, f"id{i}", 1, later_ms)
    subjects = node.engine.subjects
    before = [subject.bucket for subject in subjects.slots if subject is not None]
    assert subjects.expire(later_ms, 30)
    after = [subject.bucket for subject in subjects.slots if subject is not None]
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 30
    assert subjects.expired == 0


def test_each_new_subject_removes_a_few_that_have_expired() -> None:
    node = Node(has_origin=False)
    for i in range(100):
        node.decide(SECOND, f"old{i}", 1, T)
    subjects = node.engine.subjects
    for i in range(10):
        expired = subjects.expired
        node.decide(SECOND, f"new{i}", 1, T + 60_000)
        assert expired < subjects.expired <= expired + 4
    for i in range(10, 40):
        node.decide(SECOND, f"new{i}", 1, T + 60_000)
    assert subjects.expired == 100, "expiry outruns growth"


def test_an_evicted_subject_leaves_no_trace_in_the_expiry_buckets() -> None:
    node = bounded(2)
    for i in range(50):
        node.decide(SECOND, f"id{i}", 1, T + i)
    subjects = node.engine.subjects
    while subjects.expire(T + 600_000, 10):
        pass
    assert subjects.count == 0
    assert subjects.expired == 2
    assert subjects._buckets == {} and subjects._due == []


def test_subjects_of_all_durations_expire() -> None:
    node = Node(has_origin=False)
    limits = [Limit(10, duration_ms=1_000 * 3**power, namespace="default") for power in range(14)]
    for limit in limits:
        node.decide(limit, "a", 1, T)
    for limit in limits:
        node.engine.subjects.expire(T + 5 * limit.duration_ms, 100)
        assert not node.knows(limit, "a")
    assert node.engine.subjects.count == 0


# -- tables and slots


def test_a_table_that_grows_large_is_split_and_keeps_everything() -> None:
    node = Node(has_origin=False)
    many = Table.SPLIT_AT + 500
    for i in range(many):
        node.decide(DAY, f"id{i}", i % 10, T)
    table = node.engine.subjects.tables[DAY.key]
    assert (table.count, len(table.shards)) == (many, Table.SHARDS)
    assert all(node.decide(DAY, f"id{i}", 0, T).effective == i % 10 for i in range(many))
    assert node.engine.subjects.count == many
    assert max(len(shard) for shard in table.shards) < 200


def test_a_split_table_forgets_as_well() -> None:
    many = Table.SPLIT_AT + 100
    node = bounded(Table.SPLIT_AT + 50)
    for i in range(many):
        node.decide(DAY, f"id{i}", 1, T + i)
    assert node.engine.subjects.count == Table.SPLIT_AT + 50
    assert not node.knows(DAY, "id49") and node.knows(DAY, "id50")


def test_tables_are_freed_when_empty_and_their_numbers_are_used_again() -> None:
    node = bounded(1)
    for i in range(20):
        node.decide(Limit(10, duration_ms=86_400_000, namespace=f"ns{i}"), "a", 1, T + i)
    subjects = node.engine.subjects
    assert list(subjects.tables) == [("default", "ns19", 86_400_000)]
    assert len(subjects._numbered) <= 2


def test_slots_are_used_again() -> None:
    node = bounded(3)
    for i in range(100):
        node.decide(DAY, f"id{i}", 1, T + i)
    assert len(node.engine.subjects.slots) == 4
    remembered = [subject for subject in node.engine.subjects.slots if subject is not None]
    assert sorted(subject.identifier for subject in remembered) == ["id97", "id98", "id99"]


def test_no_list_that_shrinks_with_the_subjects_grows_large() -> None:
    node = Node(has_origin=False)
    many = 2 * LIST_MAX + 500
    for i in range(many):
        node.decide(SECOND, f"id{i}", 1, T)
    subjects = node.engine.subjects
    assert max(map(len, subjects._buckets.values())) <= LIST_MAX
    while subjects.expire(T + 60_000, 1_000):
        pass
    assert (subjects.count, subjects.expired) == (0, many)
    assert sum(map(len, subjects._free_slots)) == many
    assert max(map(len, subjects._free_slots)) <= LIST_MAX
    for i in range(many):
        node.decide(SECOND, f"id{i}", 1, T + 60_000)
    assert (len(subjects.slots), subjects._free_slots) == (many, [])


def test_a_forgotten_subject_is_marked_as_forgotten() -> None:
    node = bounded(1)
    node.decide(DAY, "a", 1, T)
    subject = node.subject(DAY, "a")
    node.decide(DAY, "b", 1, T + 1)
    assert subject.table == -1
    assert node.engine.subjects.find(DAY.key, "a") is None


# -- counting


@given(
    has_origin=st.booleans(),
    steps=st.lists(
        st.tuples(
            st.sampled_from([SECOND, MINUTE]),
            st.sampled_from("abcde"),
            st.integers(-200_000, 200_000),
            st.booleans(),
        ),
        max_size=60,
    ),
)
def test_the_number_of_cells_is_that_of_the_cells_remembered(
    has_origin: bool, steps: list[tuple[Limit, str, int, bool]]
) -> None:
    node = bounded(4, has_origin=has_origin)
    subjects = node.engine.subjects
    now_ms = T
    for limit, identifier, step_ms, expires in steps:
        now_ms += step_ms
        node.engine.decide(limit, identifier, 1, now_ms)
        if expires:
            subjects.expire(now_ms, 3)
        assert subjects.cells == sum(len(held.cells()) for held in subjects.slots if held is not None)


def test_denials_after_a_read_are_counted_separately() -> None:
    origin = DictOrigin()
    other = Node("n2")
    other.limit(DAY, "a", 10, T, origin)
    other.replay(origin, T)
    node = Node(has_origin=True, tuning=Tuning())
    assert not node.limit(DAY, "a", 1, T, origin)
    assert node.limit(DAY, "b", 1, T, origin)
    node.engine.decide(DAY, "c", 11, T, DEGRADED)
    assert (node.engine.from_origin, node.engine.denied_from_origin, node.engine.denied) == (2, 1, 2)


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_spray_while_the_origin_is_down_fills_no_queue(in_batches: bool) -> None:
    node = Node(has_origin=True, has_ledger=True, tuning=Tuning(subjects_max=100, touch_ms=1))
    for number in range(20_000):
        if in_batches:
            node.engine.decide_many([(DAY, f"spray {number}", 3)], T + number, DEGRADED)
        else:
            node.engine.decide(DAY, f"spray {number}", 3, T + number, DEGRADED)
    assert node.engine.subjects.count == 100
    assert len(node.engine.pending.dirty) < 1_000
    assert len(node.engine.pending.changed) < 1_000
    assert len(node.engine.pending.pressed) < 1_000


# -- a ledger without an origin


def test_counts_that_wait_for_the_ledger_are_evicted_last_and_are_counted_then() -> None:
    node = Node(has_origin=False, has_ledger=True, tuning=Tuning(subjects_max=4, touch_ms=1))
    for later_ms, identifier in enumerate("ab"):
        node.decide(DAY, identifier, 5, T + later_ms)
    for later_ms in range(20):
        node.decide(DAY, f"look{later_ms}", 0, T + 10 + later_ms)
    assert known(node, DAY, "ab") == "ab"
    assert node.engine.subjects.evicted_unreplayed == 0
    for later_ms, identifier in enumerate("cdefg"):
        node.decide(DAY, identifier, 5, T + 50 + later_ms)
    assert node.engine.subjects.evicted_unreplayed == 3


def test_published_counts_are_evicted_like_any_others() -> None:
    node, ledger = Node(has_origin=False, has_ledger=True, tuning=Tuning(subjects_max=4)), DictLedger()
    for identifier in "ab":
        node.decide(DAY, identifier, 5, T)
        assert node.subject(DAY, identifier).queue == PINNED
    node.decide(Limit(1_000, duration_ms=86_400_000, namespace="default"), "c", 5, T)
    node.publish(ledger, T)
    assert [row.identifier for row in ledger.rows()] == ["a", "b"]
    assert {node.subject(DAY, identifier).queue for identifier in "abc"} == {CLEAN}
