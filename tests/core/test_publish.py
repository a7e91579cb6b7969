"""What is published to the ledger, when, and in which order: the filters, the threshold, pressure and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.nodes import PLAIN, DictLedger, DictOrigin, Node
from tidegate.core.ledger_sync import Found, Publication
from tidegate.core.model import LedgerRow, Limit, OriginReply, Request, Tuning
from tidegate.core.sharing import DUE
from tidegate.core.windows import publish_threshold

MINUTE = 60_000
T = MINUTE * 1000 + 30_000
LIMIT = Limit(100, duration_ms=MINUTE, namespace="default")


def regional_node(region: str = "fra", regions: int = 1, tuning: Tuning = PLAIN) -> Node:
    """A region of one node, without an origin."""
    node = Node(region=region, has_origin=False, has_ledger=True, tuning=tuning)
    node.ledger_sync.apply_regions(regions)
    node.run_sweep()
    return node


def foreign_row(regional: int, sequence: int = 1000, region: str = "iad", identifier: str = "a") -> LedgerRow:
    return LedgerRow(
        "default", "default", identifier, MINUTE, sequence, region, regional, MINUTE * (sequence + 2)
    )


def planned(node: Node, now_ms: int = T, *, pressed_only: bool = False) -> Publication:
    publication = node.plan_publish(now_ms, pressed_only=pressed_only)
    assert publication is not None
    return publication


def nothing_to_publish(node: Node, now_ms: int = T, *, pressed_only: bool = False) -> bool:
    return node.plan_publish(now_ms, pressed_only=pressed_only) is None


# -- the filters


def test_a_row_carries_the_subject_the_regional_count_and_its_expiry() -> None:
    node, origin = Node(region="fra", has_ledger=True), DictOrigin()
    limit = Limit(100, duration_ms=MINUTE, namespace="mail", workspace="ws")
    need = node.need(limit, "a", 1, T)
    node.origin_sync.apply_read(need, [OriginReply(30, 0), OriginReply(0, 0)], T)
    node.limit(limit, "a", 12, T, origin)
    row = LedgerRow("ws", "mail", "a", MINUTE, 1000, "fra", 42, MINUTE * 1002)
    assert planned(node).rows == [row]


@pytest.mark.parametrize(("duration_ms", "published"), [(59_999, False), (60_000, True)])
def test_windows_shorter_than_a_minute_stay_regional(duration_ms: int, published: bool) -> None:
    node = regional_node()
    node.decide(Limit(10, duration_ms=duration_ms, namespace="default"), "a", 10, T)
    assert nothing_to_publish(node) != published


def test_a_cell_is_published_until_it_no_longer_counts_in_any_decision() -> None:
    for now_ms, published in ((MINUTE * 1002 - 1, True), (MINUTE * 1002, False)):
        node = regional_node()
        node.decide(LIMIT, "a", 50, T)
        assert nothing_to_publish(node, now_ms) != published


def test_only_growth_is_published() -> None:
    node, ledger = regional_node(), DictLedger()
    node.decide(LIMIT, "a", 50, T)
    assert len(node.publish(ledger, T)) == 1
    node.decide(LIMIT, "a", 0, T)
    node.decide(LIMIT, "a", 500, T)
    assert nothing_to_publish(node)
    node.decide(LIMIT, "a", 1, T)
    assert [row.regional for row in planned(node).rows] == [51]


@given(st.integers(1, 500), st.integers(1, 30), st.data())
def test_a_cell_below_its_threshold_is_silent_and_at_it_is_not(
    quota: int, regions: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, quota))
    node = regional_node(regions=regions)
    node.decide(Limit(quota, duration_ms=MINUTE, namespace="default"), "a", count, T)
    assert nothing_to_publish(node) == (count < publish_threshold(quota, regions))


def test_once_another_region_has_published_the_cell_every_change_matters() -> None:
    node, ledger = regional_node(), DictLedger()
    node.decide(LIMIT, "a", 1, T)
    assert nothing_to_publish(node)
    node.ledger_sync.apply_import([foreign_row(5)], T)
    assert [row.regional for row in node.publish(ledger, T)] == [1]
    node.decide(LIMIT, "a", 1, T)
    assert [row.regional for row in node.publish(ledger, T)] == [2]


def test_the_lowest_limit_that_a_cell_is_asked_for_with_gives_its_threshold() -> None:
    high, low = (
        Limit(1_000, duration_ms=MINUTE, namespace="default"),
        Limit(50, duration_ms=MINUTE, namespace="default"),
    )
    asked_with: dict[str, Callable[[Node], object]] = {
        "accepted": lambda node: node.decide(low, "a", 1, T),
        "denied": lambda node: node.decide(low, "a", 40, T),
        "peeked": lambda node: node.decide(low, "a", 0, T),
        "in a batch that fails": lambda node: node.limit_many([Request(low, "a", 40)], T),
        "in a batch that looks": lambda node: node.limit_many([Request(low, "a", 0)], T),
        "in a batch that others fail": lambda node: node.limit_many(
            [Request(low, "a", 1), Request(low, "b", 51)], T
        ),
    }
    for how, ask in asked_with.items():
        node = regional_node()
        node.decide(high, "a", 30, T)
        assert nothing_to_publish(node), "30 of 1000 are not worth a row"
        ask(node)
        publication = node.plan_publish(T)
        assert publication is not None, f"30 of 50 are, even if the lower limit was only {how}"


def test_more_regions_lower_the_threshold_of_cells_that_were_silent() -> None:
    node = regional_node(regions=1)
    node.decide(LIMIT, "a", 10, T)
    assert nothing_to_publish(node)
    node.ledger_sync.apply_regions(10)
    assert node.sweep.is_active
    node.run_sweep(1)
    assert [row.regional for row in planned(node).rows] == [10]


def test_fewer_regions_need_no_sweep_and_none_at_all_count_as_one() -> None:
    node = regional_node(regions=5)
    node.ledger_sync.apply_regions(0)
    assert not node.sweep.is_active
    assert node.engine.global_view.regions == 1


def test_cost_zero_and_denials_are_never_published() -> None:
    node = regional_node()
    for _ in range(5):
        node.decide(LIMIT, "a", 0, T)
        node.decide(LIMIT, "a", 101, T)
    assert node.engine.pending.changed == [] and node.engine.pending.pressed == []
    assert nothing_to_publish(node)


def test_counts_of_other_nodes_are_published_by_a_node_that_had_requests() -> None:
    node = Node(has_ledger=True)
    need = node.need(LIMIT, "a", 0, T)
    node.origin_sync.apply_read(need, [OriginReply(70, 0), OriginReply(0, 0)], T)
    assert nothing_to_publish(node), "this node was never asked, so it knows no limit"
    node.decide(LIMIT, "a", 0, T)
    assert [row.regional for row in planned(node).rows] == [70]


def test_a_row_that_this_node_published_for_itself_is_not_taken_for_counts_of_others() -> None:
    """Another node has reported the row, and this one gets an answer to a message from before its requests."""
    node = Node(has_ledger=True)
    node.limit(LIMIT, "a", 40, T)
    node.publish(DictLedger(), T)
    subject, cell = node.subject(LIMIT, "a"), node.cell(LIMIT, "a", 1000)
    for total, base, others in ((40, 40, 0), (45, 40, 5), (45, 42, 5), (6, 0, 6)):
        node.origin_sync.apply_report(subject, cell, 0, 0, total, 0, base, T)
        assert (cell.own, cell.others) == (40, others)
    node.origin_sync.apply_report(subject, cell, 40, 0, 47, 0, 0, T)
    assert (cell.own, cell.others) == (40, 7)


# -- order and accounting


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["w", "v"]),
            st.sampled_from(["n", "m"]),
            st.sampled_from(["a", "b", "B", "é", "\ud800"]),
            st.sampled_from([60_000, 120_000]),
            st.sampled_from([0, 60_000]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_every_row_of_a_publication_goes_with_its_subject_and_cell(
    asked: list[tuple[str, str, str, int, int]],
) -> None:
    node = regional_node()
    for workspace, namespace, identifier, duration_ms, later_ms in asked:
        limit = Limit(1_000, duration_ms=duration_ms, namespace=namespace, workspace=workspace)
        node.decide(limit, identifier, 300, T + later_ms)
    publication = planned(node, T + 60_000)
    keys = [row[:5] for row in publication.rows]
    assert len(keys) == len(set(keys)) > 0
    for row, subject, cell in zip(publication.rows, publication.subjects, publication.cells, strict=True):
        assert subject is not None and cell is not None
        assert (row.identifier, row.sequence) == (subject.identifier, cell.sequence)


@given(st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_a_turn_in_slices_takes_what_a_turn_at_once_takes(
    count: int, slice_size: int, pressed_only: bool
) -> None:
    at_once, in_slices = regional_node(), regional_node()
    for node in (at_once, in_slices):
        for i in range(count):
            node.decide(LIMIT, f"id{i}", 30 if i % 3 else 1, T)
    expected = at_once.plan_publish(T, pressed_only=pressed_only)
    runs: list[list[Found]] = []
    waiting = in_slices.ledger_sync.subjects_waiting(pressed_only=pressed_only)
    for start in range(0, waiting, slice_size):
        runs.append([])
        in_slices.ledger_sync.collect_publish(
            runs[-1], T, min(slice_size, waiting - start), pressed_only=pressed_only
        )
        assert len(runs[-1]) <= slice_size
    collected = sorted(row for run in runs for row, _, _ in run)
    assert collected == ([] if expected is None else expected.rows)
    assert in_slices.ledger_sync.subjects_waiting(pressed_only=pressed_only) == 0


def test_a_refused_row_waits_for_the_next_turn_not_for_the_end_of_this_one() -> None:
    node = regional_node()
    for identifier in ("bad", "good"):
        node.decide(LIMIT, identifier, 50, T)
    publication = planned(node)
    node.ledger_sync.set_aside(publication, 0, T)
    node.ledger_sync.fail_publish(publication, 1, 2)
    assert node.ledger_sync.subjects_waiting() == 2
    run: list[Found] = []
    for _ in range(2):
        node.ledger_sync.collect_publish(run, T, 1)
    assert [row.identifier for row, _, _ in run] == ["good"]
    assert node.ledger_sync.subjects_waiting() == 1, "it came back, for later"


def test_each_chunk_is_accounted_for_by_itself() -> None:
    node = regional_node()
    for i in range(6):
        node.decide(LIMIT, f"id{i}", 50, T)
    publication = planned(node)
    node.ledger_sync.apply_publish(publication, 0, 2, T)
    node.ledger_sync.fail_publish(publication, 2, 4)
    node.ledger_sync.apply_publish(publication, 4, 6, T)
    assert [row.identifier for row in planned(node).rows] == ["id2", "id3"]


def test_growth_while_a_row_is_on_its_way_waits_for_the_next_turn() -> None:
    node = regional_node()
    node.decide(LIMIT, "a", 50, T)
    publication = planned(node)
    node.decide(LIMIT, "a", 5, T)
    node.ledger_sync.apply_publish(publication, 0, 1, T)
    assert [row.regional for row in planned(node).rows] == [55]


def test_last_published_is_raised_by_the_row_of_another_node() -> None:
    node, neighbour, origin, ledger = (
        Node("n1", has_ledger=True),
        Node("n2", has_ledger=True),
        DictOrigin(),
        DictLedger(),
    )
    for one in (node, neighbour):
        one.limit(LIMIT, "a", 20, T, origin)
        one.replay(origin, T)
    node.limit(LIMIT, "a", 0, T + 6_000, origin)
    assert [row.regional for row in node.publish(ledger, T + 6_000)] == [40]
    neighbour.import_all(ledger, T + 6_000)
    assert neighbour.publish(ledger, T + 6_000) == []
    assert ledger.rows_written == 1


# -- pressure


def test_a_cell_presses_when_it_has_grown_by_its_part_of_the_headroom() -> None:
    node, ledger = regional_node(), DictLedger()
    pressed = []
    for cost in (19, 5):
        node.engine.pending.is_urgent = False
        node.decide(LIMIT, "a", cost, T)
        pressed.append((bool(node.engine.pending.pressed), node.engine.pending.is_urgent))
    assert pressed == [(False, False), (True, True)], (
        "above its threshold it presses, and the driver is woken"
    )
    assert [row.regional for row in node.publish(ledger, T, pressed_only=True)] == [24]
    # Headroom is 76 of 100, one region is seen: it presses again after 76 // 4 more.
    node.decide(LIMIT, "a", 18, T)
    assert nothing_to_publish(node, pressed_only=True)
    node.decide(LIMIT, "a", 1, T)
    assert [row.regional for row in planned(node, pressed_only=True).rows] == [43]


def test_the_part_of_the_headroom_is_shared_among_the_regions_seen_on_the_cell() -> None:
    node, ledger = regional_node(), DictLedger()
    rows = [foreign_row(10, region=region) for region in ("iad", "syd", "gru")]
    node.decide(LIMIT, "a", 6, T)
    node.ledger_sync.apply_import(rows, T)
    assert [row.regional for row in node.publish(ledger, T, pressed_only=True)] == [6]
    # 100 - 36 = 64 are left, four regions are seen: a step is 64 // 16.
    node.decide(LIMIT, "a", 3, T)
    assert nothing_to_publish(node, pressed_only=True)
    node.decide(LIMIT, "a", 1, T)
    assert [row.regional for row in planned(node, pressed_only=True).rows] == [10]


def test_the_window_before_is_part_of_what_is_used() -> None:
    node, ledger = regional_node(), DictLedger()
    node.decide(LIMIT, "a", 80, T - MINUTE)
    node.decide(LIMIT, "a", 20, T)
    node.publish(ledger, T)
    # 20 and half of 80 are used, 40 are left, a step is 10.
    node.decide(LIMIT, "a", 9, T)
    assert nothing_to_publish(node, pressed_only=True)
    node.decide(LIMIT, "a", 1, T)
    assert [row.regional for row in planned(node, pressed_only=True).rows] == [30]


def test_pressure_takes_only_what_presses_and_the_tick_takes_the_rest() -> None:
    node = regional_node()
    node.decide(LIMIT, "hot", 90, T)
    node.decide(LIMIT, "warm", 20, T)
    node.publish(DictLedger(), T)
    node.decide(LIMIT, "warm", 1, T)
    node.decide(LIMIT, "hot", 9, T)
    assert [row.identifier for row in planned(node, pressed_only=True).rows] == ["hot"]
    assert [row.identifier for row in planned(node).rows] == ["warm"]
    assert nothing_to_publish(node) and nothing_to_publish(node, pressed_only=True)


def test_an_almost_full_cell_is_under_pressure_with_every_unit() -> None:
    node, ledger = regional_node(), DictLedger()
    for expected in (97, 98, 99, 100):
        node.decide(LIMIT, "a", 97 if expected == 97 else 1, T)
        assert [row.regional for row in node.publish(ledger, T, pressed_only=True)] == [expected]


def test_imports_are_fast_while_cells_above_their_threshold_grow() -> None:
    node = regional_node()
    node.decide(LIMIT, "a", 10, T)
    assert nothing_to_publish(node) and node.ledger_sync.hot_until_ms == 0
    node.decide(LIMIT, "a", 10, T)
    assert planned(node).rows and node.ledger_sync.hot_until_ms == T + 10_000


# -- refusals


def test_a_rejected_row_waits_longer_each_time_and_delays_no_other() -> None:
    node = regional_node()
    hour = Limit(100, duration_ms=3_600_000, namespace="default")
    at_ms = 3_600_000 * 1000
    node.decide(hour, "bad", 50, at_ms)
    node.decide(hour, "good", 50, at_ms)
    publication = planned(node, at_ms)
    node.ledger_sync.set_aside(publication, 0, at_ms)
    node.ledger_sync.apply_publish(publication, 1, 2, at_ms)
    for wait_ms in (60_000, 120_000, 240_000):
        node.decide(hour, "bad", 1, at_ms)
        assert nothing_to_publish(node, at_ms + wait_ms - 1)
        assert nothing_to_publish(node, at_ms + wait_ms - 1, pressed_only=True)
        at_ms += wait_ms
        publication = planned(node, at_ms)
        assert [row.identifier for row in publication.rows] == ["bad"]
        node.ledger_sync.set_aside(publication, 0, at_ms)
    assert node.ledger_sync.rows_set_aside == 4


def test_the_pause_of_a_refused_row_starts_again_after_a_success() -> None:
    node = regional_node()
    node.decide(LIMIT, "a", 50, T)
    node.ledger_sync.set_aside(planned(node), 0, T - 100_000)
    publication = planned(node)
    node.ledger_sync.apply_publish(publication, 0, 1, T)
    node.decide(LIMIT, "a", 1, T)
    node.ledger_sync.set_aside(planned(node), 0, T)
    assert nothing_to_publish(node, T + 59_999)


def test_the_time_of_the_next_try_never_falls() -> None:
    node = regional_node()
    node.decide(LIMIT, "a", 50, T)
    publication = planned(node)
    node.ledger_sync.set_aside(publication, 0, T)
    node.ledger_sync.apply_publish(publication, 0, 1, T)
    node.ledger_sync.set_aside(publication, 0, T - 10_000)
    ledger = node.cell(LIMIT, "a", 1000).ledger
    assert ledger is not None and ledger.set_aside_until_ms == T + 60_000


def test_rows_of_subjects_that_were_evicted_meanwhile_are_ignored() -> None:
    node = regional_node(tuning=Tuning(subjects_max=1))
    node.decide(LIMIT, "a", 50, T)
    publication = planned(node)
    node.decide(LIMIT, "b", 1, T)
    assert not node.knows(LIMIT, "a")
    node.ledger_sync.fail_publish(publication, 0, 1)
    node.ledger_sync.set_aside(publication, 0, T)
    node.ledger_sync.apply_publish(publication, 0, 1, T)
    assert nothing_to_publish(node)


def test_what_the_origin_did_not_know_when_a_row_was_written_is_published_with_the_next_one() -> None:
    """Without more traffic: the origin answers with its own total, which may be less than the node counts."""
    node, origin = Node(region="fra", has_ledger=True), DictOrigin()
    need = node.need(LIMIT, "a", 1, T)
    node.origin_sync.apply_read(need, [OriginReply(0, 0), OriginReply(0, 0)], T)
    node.limit(LIMIT, "a", 61, T, origin)
    publication = planned(node)
    assert node.ledger_sync.apply_claim(publication, 0, total=60, published=0, due=DUE)
    node.ledger_sync.apply_publish(publication, 0, 1, T)
    assert [row.regional for row in publication.rows] == [60]
    assert [row.regional for row in planned(node).rows] == [61]
