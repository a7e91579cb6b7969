"""Imports from the ledger: foreign components, own rows, a wiped ledger, and anticipation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.core.nodes import DictLedger, DictOrigin, Node
from tidegate.core.freshness import COLD
from tidegate.core.model import LedgerRow, Limit, OriginReply, Tuning

MINUTE = 60_000
T = MINUTE * 1000 + 30_000
LIMIT = Limit(100, duration_ms=MINUTE, namespace="default")


def row(regional: int, region: str = "iad", sequence: int = 1000, identifier: str = "a") -> LedgerRow:
    return LedgerRow(
        "default", "default", identifier, MINUTE, sequence, region, regional, MINUTE * (sequence + 2)
    )


def region_of_one(tuning: Tuning | None = None) -> Node:
    return Node(has_origin=False, has_ledger=True, tuning=tuning or Tuning(anticipation=False))


# -- components


def test_foreign_components_are_summed_and_each_only_rises() -> None:
    node = region_of_one()
    for region, regional in (("iad", 5), ("syd", 7), ("iad", 3), ("iad", 9), ("syd", 7)):
        node.ledger_sync.apply_import([row(regional, region)], T)
    assert node.decide(LIMIT, "a", 0, T).effective == 9 + 7
    cell = node.cell(LIMIT, "a", 1000)
    assert (cell.own, cell.others, cell.foreign) == (0, 0, 16)
    assert cell.ledger is not None and cell.ledger.components == {"iad": 9, "syd": 7}


def test_imports_of_the_window_before_are_carried() -> None:
    node = region_of_one()
    node.ledger_sync.apply_import([row(40, sequence=999)], T)
    assert node.decide(LIMIT, "a", 0, T).effective == 20


def test_cells_that_are_not_known_yet_are_created_and_counted() -> None:
    node = region_of_one()
    node.ledger_sync.apply_import([row(5), row(6, sequence=999), row(7, identifier="b")], T)
    assert node.ledger_sync.cells_imported == 3
    assert node.ledger_sync.rows_imported == 3
    node.ledger_sync.apply_import([row(9)], T)
    assert (node.ledger_sync.cells_imported, node.ledger_sync.rows_imported) == (3, 4)


def test_expired_rows_and_rows_of_short_windows_are_ignored() -> None:
    node = region_of_one()
    short = LedgerRow("default", "default", "a", 59_999, 1000, "iad", 5, 10**15)
    node.ledger_sync.apply_import([row(5, sequence=998), row(5, sequence=1), short], T)
    assert node.engine.subjects.count == 0
    node.ledger_sync.apply_import([row(5, sequence=999)], MINUTE * 1001)
    assert node.engine.subjects.count == 0, "it expired in this millisecond"
    node.ledger_sync.apply_import([row(5, sequence=999)], MINUTE * 1001 - 1)
    assert node.engine.subjects.count == 1


def test_a_row_from_a_clock_that_runs_ahead_is_kept_for_its_time_and_evicts_nothing() -> None:
    node, origin = Node(has_ledger=True), DictOrigin()
    for now_ms, cost in ((T - MINUTE, 40), (T, 10)):
        node.limit(LIMIT, "a", cost, now_ms, origin)
        node.replay(origin, now_ms)
    node.ledger_sync.apply_import([row(90, sequence=1002)], T)
    assert node.decide(LIMIT, "a", 0, T).effective == 10 + 20
    assert node.limit(LIMIT, "a", 0, T + 2 * MINUTE, origin).effective == 90


# -- own rows


def test_an_own_row_raises_the_regions_count_as_a_lower_bound() -> None:
    node = region_of_one()
    node.decide(LIMIT, "a", 10, T)
    node.ledger_sync.apply_import([row(30, "fra")], T)
    cell = node.cell(LIMIT, "a", 1000)
    assert (cell.own, cell.others, cell.foreign) == (10, 20, 0)
    node.ledger_sync.apply_import([row(25, "fra")], T)
    assert cell.regional() == 30
    node.decide(LIMIT, "a", 1, T)
    assert cell.regional() == 31


def test_a_region_that_lost_everything_but_the_ledger_gets_its_counts_back() -> None:
    node = Node("after-the-restart", has_ledger=True)
    node.ledger_sync.apply_import([row(80, "fra")], T)
    decision = node.limit(LIMIT, "a", 30, T, DictOrigin())
    assert not decision and decision.effective == 110


def test_an_own_row_counts_no_unit_twice_that_the_origin_brings_too() -> None:
    node, ledger, origin = Node(has_ledger=True), DictLedger(), DictOrigin()
    node.limit(LIMIT, "a", 40, T, origin)
    node.replay(origin, T)
    node.publish(ledger, T)
    node.import_all(ledger, T)
    node.limit(LIMIT, "a", 0, T + 6_000, origin)
    assert node.cell(LIMIT, "a", 1000).total() == 40


def test_own_rows_make_nothing_fresh() -> None:
    node = Node(has_ledger=True)
    node.ledger_sync.apply_import([row(3, "fra")], T)
    assert node.need(LIMIT, "a", 1, T).reason == COLD


# -- a ledger that lost rows


def test_a_wiped_ledger_is_published_again_after_a_full_import() -> None:
    node, ledger = region_of_one(), DictLedger()
    for i in range(5):
        node.decide(LIMIT, f"id{i}", 50, T)
    node.decide(LIMIT, "silent", 1, T)
    node.publish(ledger, T)
    node.import_all(ledger, T)
    node.run_sweep(2)
    assert node.engine.pending.changed == [], "what was never in the ledger cannot be lost there"
    full = dict(ledger.counts)
    ledger.counts.clear()
    node.import_all(ledger, T + 1_000)
    node.run_sweep(2)
    node.publish(ledger, T + 1_000)
    assert ledger.counts == full


def test_a_row_that_is_published_during_a_full_import_is_not_taken_for_a_lost_one() -> None:
    node, ledger = region_of_one(), DictLedger()
    node.decide(LIMIT, "a", 50, T)
    node.ledger_sync.begin_full_import()
    node.publish(ledger, T)
    node.ledger_sync.finish_import(T, full=True)
    node.run_sweep()
    assert node.plan_publish(T) is None


def test_an_incremental_import_without_an_own_row_is_not_a_sign_of_a_wipe() -> None:
    node, ledger = region_of_one(), DictLedger()
    node.decide(LIMIT, "a", 50, T)
    node.publish(ledger, T)
    node.ledger_sync.apply_import([row(5)], T)
    node.ledger_sync.finish_import(T)
    assert not node.sweep.is_active


def test_an_empty_ledger_is_not_a_loss_when_nothing_was_published_or_all_has_expired() -> None:
    for published, now_ms in ((False, T), (True, MINUTE * 1002)):
        node = region_of_one()
        node.decide(LIMIT, "a", 50, T)
        if published:
            node.publish(DictLedger(), T)
        node.import_all(DictLedger(), now_ms)
        assert not node.sweep.is_active


def test_a_ledger_restored_from_an_older_copy_gets_the_newer_counts_again() -> None:
    node, ledger = region_of_one(), DictLedger()
    node.decide(LIMIT, "a", 30, T)
    node.publish(ledger, T)
    older = dict(ledger.counts)
    node.decide(LIMIT, "a", 30, T)
    node.publish(ledger, T)
    ledger.counts = older
    node.import_all(ledger, T)
    assert [one.regional for one in node.publish(ledger, T)] == [60]


def test_a_row_that_an_older_copy_does_not_have_is_published_again() -> None:
    node, ledger = region_of_one(), DictLedger()
    node.decide(LIMIT, "a", 30, T)
    node.publish(ledger, T)
    older = dict(ledger.counts)
    node.decide(LIMIT, "b", 30, T)
    node.publish(ledger, T)
    ledger.counts = older
    node.import_all(ledger, T)
    node.run_sweep()
    assert [(one.identifier, one.regional) for one in node.publish(ledger, T)] == [("b", 30)]


# -- a full memory


def small_region(subjects_max: int) -> Node:
    return region_of_one(Tuning(anticipation=False, subjects_max=subjects_max))


def test_foreign_counts_that_were_evicted_are_asked_for_when_a_request_needs_them() -> None:
    node = small_region(3)
    node.ledger_sync.begin_full_import()
    node.ledger_sync.apply_import([row(100)], T)
    assert node.decide(LIMIT, "a", 0, T).effective == 100
    for number in range(10):
        node.decide(LIMIT, f"spray{number}", 1, T + 1 + number)
    assert not node.knows(LIMIT, "a")
    node.ledger_sync.begin_full_import()
    for number in range(10, 14):
        node.decide(LIMIT, f"spray{number}", 1, T + 1 + number)
    node.decide(LIMIT, "a", 0, T + 20)
    assert node.ledger_sync.wants_full_import
    node.ledger_sync.begin_full_import()
    node.ledger_sync.apply_import([row(100)], T + 30, full=True)
    assert not node.decide(LIMIT, "a", 1, T + 30)


def test_rows_of_other_regions_evict_nothing_that_is_used_here() -> None:
    node = small_region(3)
    for identifier in "abc":
        assert node.decide(LIMIT, identifier, 100, T)
    sprayed = [row(50, identifier=f"spray{number}") for number in range(20)]
    node.ledger_sync.apply_import([*sprayed, row(7, identifier="a")], T + 1)
    assert not any(node.decide(LIMIT, identifier, 1, T + 2) for identifier in "abc")
    assert node.cell(LIMIT, "a", 1000).foreign == 7
    node.decide(LIMIT, "spray3", 0, T + 3)
    assert node.ledger_sync.wants_full_import, "one of the rows that did not fit is needed now"


def test_rows_take_the_place_of_subjects_that_have_aged_out() -> None:
    node = small_region(2)
    second = Limit(10, duration_ms=1_000, namespace="default")
    for identifier in "xy":
        node.decide(second, identifier, 1, T - 25_000)
    node.ledger_sync.apply_import([row(5)], T)
    assert node.decide(LIMIT, "a", 0, T).effective == 5


def test_a_full_read_that_fails_is_wanted_again() -> None:
    node = small_region(2)
    for number in range(5):
        node.decide(LIMIT, f"spray{number}", 1, T + number)
    node.ledger_sync.begin_full_import()
    node.ledger_sync.fail_full_import()
    assert node.ledger_sync.wants_full_import


# -- anticipation


def growing(node: Node, *sightings: tuple[int, int]) -> None:
    """(at_ms, count of iad) as the imports saw it."""
    for at_ms, regional in sightings:
        node.ledger_sync.apply_import([row(regional)], at_ms)
        node.ledger_sync.finish_import(at_ms)


def test_between_imports_a_decision_adds_what_has_probably_grown() -> None:
    node = region_of_one(Tuning())
    growing(node, (T, 10), (T + 1_000, 50))
    # 40 a second: after half a second 50 + 20 are probably used.
    at_ms = T + 1_500
    assert node.decide(LIMIT, "a", 30, at_ms).effective == 80
    denial = node.decide(LIMIT, "a", 1, at_ms)
    assert not denial
    assert denial.effective == 81, "what is only probable is not reported"
    assert denial.retry_after_ms, "but the request waits for it"


def test_a_probable_denial_names_the_next_import_not_the_end_of_the_window() -> None:
    day = Limit(100, duration_ms=24 * 60 * MINUTE, namespace="default")
    sequence = T // day.duration_ms
    node = region_of_one(Tuning())
    for at_ms, regional in ((T, 10), (T + 1_000, 60)):
        node.ledger_sync.apply_import(
            [
                LedgerRow(
                    *("default", "default", "a", day.duration_ms, sequence),
                    "iad",
                    regional,
                    (sequence + 2) * day.duration_ms,
                )
            ],
            at_ms,
        )
        node.ledger_sync.finish_import(at_ms)
    node.ledger_sync.expect_import(T + 6_000)
    denial = node.decide(day, "a", 40, T + 1_500)
    assert not denial and denial.effective == 100
    assert denial.retry_after_ms == 4_500
    node.ledger_sync.finish_import(T + 6_000)
    assert node.decide(day, "a", 40, T + 6_000), "it grew no further"


def test_a_probable_denial_while_an_import_is_late_names_an_interval() -> None:
    node = region_of_one(Tuning(import_interval_ms=5_000))
    growing(node, (T, 10), (T + 1_000, 90))
    node.ledger_sync.expect_import(T + 1_200)
    denial = node.decide(LIMIT, "a", 10, T + 1_500)
    assert not denial and denial.retry_after_ms == 5_000


def test_a_denial_that_only_anticipation_caused_makes_no_subject_strict() -> None:
    node = Node(has_ledger=True, tuning=Tuning())
    need = node.need(LIMIT, "a", 0, T)
    node.origin_sync.apply_read(need, [OriginReply(0, 0), OriginReply(0, 0)], T)
    growing(node, (T, 10), (T + 1_000, 90))
    assert not node.decide(LIMIT, "a", 5, T + 1_500)
    assert node.subject(LIMIT, "a").strict_until_ms == 0
    assert node.engine.strict_activations == 0
    assert node.decide(LIMIT, "a", 5, T + 1_001).source == "local"


def test_anticipation_is_neither_stored_nor_published() -> None:
    node = region_of_one(Tuning())
    growing(node, (T, 10), (T + 1_000, 50))
    node.decide(LIMIT, "a", 5, T + 2_000)
    cell = node.cell(LIMIT, "a", 1000)
    assert (cell.own, cell.others, cell.foreign) == (5, 0, 50)
    publication = node.plan_publish(T + 2_000)
    assert publication is not None and [one.regional for one in publication.rows] == [5]


def test_a_first_value_gives_no_rate_and_a_rate_ends() -> None:
    node = region_of_one(Tuning())
    growing(node, (T, 60))
    assert node.decide(LIMIT, "a", 40, T + 5_000)
    other = region_of_one(Tuning())
    growing(other, (T, 10), (T + 1_000, 50))
    assert not other.decide(LIMIT, "a", 20, T + 1_000 + 10_000)
    growing(other, (T + 11_001, 50))
    assert other.decide(LIMIT, "a", 20, T + 11_001), "an import that saw no growth says that it has stopped"


def test_what_is_anticipated_is_capped_at_two_import_intervals() -> None:
    node = region_of_one(Tuning())
    growing(node, (T, 10), (T + 1_000, 11))
    # One a second: 10 after two intervals of 5 s, and still 10 later on, as long as no import says otherwise.
    assert not node.decide(LIMIT, "a", 80, T + 25_000)
    assert node.decide(LIMIT, "a", 79, T + 25_000)


def test_the_age_of_a_row_counts_in_what_is_anticipated() -> None:
    node = region_of_one(Tuning())
    growing(node, (T, 10))
    node.ledger_sync.apply_import([row(50)], T + 1_000, lag_ms={"iad": 500})
    node.ledger_sync.finish_import(T + 1_000)
    # 40 a second, seen in a row that was half a second old: 20 more are probably there already.
    assert not node.decide(LIMIT, "a", 31, T + 1_000)
    assert node.decide(LIMIT, "a", 30, T + 1_000)


def test_growth_over_a_long_silence_gives_no_rate() -> None:
    node = region_of_one(Tuning())
    growing(node, (T, 10), (T + 10_001, 50))
    assert node.decide(LIMIT, "a", 50, T + 15_000)


def test_anticipation_can_be_switched_off_and_needs_a_ledger() -> None:
    node = region_of_one()
    growing(node, (T, 10), (T + 1_000, 50))
    assert node.decide(LIMIT, "a", 50, T + 5_000)


def test_a_probable_denial_on_a_clock_that_stepped_back_never_says_retry_at_once() -> None:
    node = region_of_one(Tuning())
    node.decide(LIMIT, "a", 1, T + 2 * MINUTE)
    growing(node, (T, 10), (T + 1_000, 90))
    denial = node.decide(LIMIT, "a", 5, T + 2_000)
    assert not denial
    assert denial.retry_after_ms


@given(
    st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 40)), min_size=2, max_size=6),
    st.integers(0, 20_000),
)
def test_anticipation_only_denies_it_never_allows_more(
    sightings: list[tuple[int, int]], later_ms: int
) -> None:
    plain, guessing = region_of_one(), region_of_one(Tuning())
    at_ms, count = T, 1
    for pause_ms, grown in sightings:
        at_ms += pause_ms
        count += grown
        for node in (plain, guessing):
            growing(node, (at_ms, count))
    for cost in (1, 20, 60, 100):
        known = plain.decide(LIMIT, "a", cost, at_ms + later_ms)
        guess = guessing.decide(LIMIT, "a", cost, at_ms + later_ms)
        assert guess.allowed <= known.allowed
        if guess.allowed != known.allowed:
            return  # from here on they have counted different things
