"""The invariants of the design that the core alone guarantees, by number.

This file has 1 to 4 and 10. The others are beside the code that they concern: 5 in test_merge_laws, 6 in test_batches
and test_threads, 7 in test_threads and test_reentrancy, 8 and 9 in test_convergence. Invariant 2 is also checked under
all events together, in test_engine_machine.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import oracle
from tests.core.nodes import DictLedger, DictOrigin, Node
from tests.core.worlds import IDENTIFIERS, REGIONS, Event, World, run, schedules
from tidegate.core.cells import Cell
from tidegate.core.freshness import Need
from tidegate.core.model import DEGRADED, Decision, LedgerRow, Limit, OriginReply, Request, Tuning

LIMIT = Limit(50, duration_ms=60_000, namespace="default")
T = 60_000 * 1000

foreign_rows = st.builds(
    lambda region, sequence, regional: LedgerRow(
        "default", "default", "a", 60_000, sequence, region, regional, (sequence + 2) * 60_000
    ),
    st.sampled_from(["iad", "syd"]),
    st.integers(999, 1001),
    st.integers(1, 40),
)


@given(st.lists(foreign_rows | st.integers(0, 30) | st.none(), max_size=25))
def test_invariant_01_a_request_never_waits_for_cross_region_state(
    events: list[LedgerRow | int | None],
) -> None:
    """Without an origin, or with a fresh one, every answer comes at once, whatever the ledger does."""
    regional = Node(has_origin=False, has_ledger=True)
    fresh = Node(has_ledger=True)
    fresh.origin_sync.apply_read(fresh.need(LIMIT, "a", 0, T), [OriginReply(0, 0), OriginReply(0, 0)], T)
    for event in events:
        for node in (regional, fresh):
            if isinstance(event, LedgerRow):
                node.ledger_sync.apply_import([event], T)
                node.ledger_sync.finish_import(T)
            elif event is None:
                node.plan_publish(T)  # and the node never learns whether it arrived
            else:
                answer = node.engine.decide(LIMIT, "a", event, T)
                if isinstance(answer, Need):
                    # Only a local denial causes a read, and only from this region's origin.
                    assert node is fresh and answer.reason == "strict"
                    assert [wanted.writer for wanted in answer.wanted] == ["n1"]
                    node.origin_sync.apply_read(answer, [OriginReply(0, 0)], T)
                    node.decide(LIMIT, "a", event, T, 1)
        decisions, _ = regional.engine.decide_many([Request(LIMIT, "a", 1)], T)
        assert decisions is not None


steps = st.lists(
    st.tuples(
        st.sampled_from(["decide", "read", "fail", "replay", "import", "publish", "refuse", "wipe", "sweep"]),
        st.integers(0, 20),
        st.integers(-3_000, 3_000),
    ),
    max_size=40,
)


@given(steps)
@settings(max_examples=150)
def test_invariant_02_counts_components_and_deadlines_only_rise_within_a_cell(
    script: list[tuple[str, int, int]],
) -> None:
    node, origin, ledger = Node(has_ledger=True), DictOrigin(), DictLedger()
    now_ms = latest_ms = T + 30_000
    before: dict[int, tuple[Cell, list[int], dict[str, int]]] = {}
    strict_until_ms = 0
    for what, much, span_ms in script:
        # A clock that steps back further than answers last begins with new deadlines.
        now_ms = max(now_ms + span_ms, latest_ms - 5_000)
        latest_ms = max(latest_ms, now_ms)
        need = node.engine.decide(LIMIT, "a", 0, now_ms)
        match what:
            case "decide":
                node.limit(LIMIT, "a", much, now_ms, origin if much % 2 else None)
            case "read" if isinstance(need, Need):
                replies = [OriginReply(much, 0)] * len(need.wanted)
                node.origin_sync.apply_read(need, replies, now_ms)
            case "fail" if isinstance(need, Need):
                node.origin_sync.apply_read_failure(need, now_ms)
            case "replay":
                node.replay(origin, now_ms)
            case "import":
                row = LedgerRow("default", "default", "a", 60_000, 1000, "iad", much, T + 120_000)
                node.ledger_sync.apply_import([row, row._replace(region="fra")], now_ms)
            case "publish":
                node.publish(ledger, now_ms)
            case "refuse":
                if (publication := node.plan_publish(now_ms)) is not None:
                    node.ledger_sync.set_aside(publication, 0, now_ms)
            case "wipe":
                origin.cells.clear()
            case _:
                node.run_sweep()
        subject = node.subject(LIMIT, "a")
        assert subject.strict_until_ms >= strict_until_ms
        strict_until_ms = subject.strict_until_ms
        for cell in subject.cells():
            of_origin, of_ledger = cell.origin, cell.ledger
            assert of_origin is not None and of_ledger is not None
            now = [cell.own, cell.others, cell.foreign, of_origin.fresh_until_ms, of_origin.failed_until_ms]
            now += [of_origin.answered_at_ms, of_ledger.set_aside_until_ms]
            components = dict(of_ledger.components or {})
            _, counts, parts = before.get(id(cell), (cell, now, components))
            assert all(later >= earlier for earlier, later in zip(counts, now, strict=True))
            assert all(components[region] >= count for region, count in parts.items())
            before[id(cell)] = (cell, now, components)


@given(schedules(World.break_origin, World.repair_origin, World.wipe_origin, World.wipe_ledger))
@settings(max_examples=60)
def test_invariant_03_a_node_writes_only_its_own_component_and_a_region_only_its_own_row(
    schedule: list[Event],
) -> None:
    world = World()
    for event in schedule:
        run(world, [event])
        for node, replay in world.flying:
            assert {one.writer for one in replay.components} == {node.engine.node_id}
            for cell, component in zip(replay.cells, replay.components, strict=True):
                assert component.own <= cell.own
    names = {
        region: {node.engine.node_id for node in world.nodes if node.region == region} for region in REGIONS
    }
    for region, origin in world.origins.items():
        for held in origin.cells.values():
            assert set(held) <= names[region]
    for node in world.nodes:
        publication = node.plan_publish(world.now_ms)
        if publication is not None:
            assert {row.region for row in publication.rows} == {node.region}


@given(schedules(World.break_ledger, World.repair_ledger, World.copy_ledger, World.restore_ledger))
@settings(max_examples=60)
def test_invariant_04_imported_counts_are_never_published(schedule: list[Event]) -> None:
    """The ledger's count of a region is what was accepted there: no import raises it, however often."""
    world = World()
    for event in schedule:
        run(world, [event])
        for (_, _, identifier, _, sequence, region), row in world.ledger.counts.items():
            assert row.regional <= world.truth[region, identifier, sequence]
    for _ in range(3):
        for node in world.nodes:
            node.import_all(world.ledger, world.now_ms)
            node.run_sweep()
            node.publish(world.ledger, world.now_ms)
    for (_, _, identifier, _, sequence, region), row in world.ledger.counts.items():
        assert row.regional <= world.truth[region, identifier, sequence]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(IDENTIFIERS), st.integers(1, 20)), max_size=12),
    st.integers(0, 4),
    st.integers(0, 59_999),
)
def test_invariant_10_aged_out_cells_influence_nothing(
    past: list[tuple[int, str, int]], later: int, elapsed_ms: int
) -> None:
    node = Node(has_ledger=True, tuning=Tuning(anticipation=False))
    counted: dict[str, dict[int, int]] = {}
    for minute, identifier, cost in sorted(past):
        assert node.decide(
            Limit(10**6, duration_ms=60_000, namespace="default"),
            identifier,
            cost,
            T + minute * 60_000,
            DEGRADED,
        )
        cells = counted.setdefault(identifier, {})
        cells[1000 + minute] = cells.get(1000 + minute, 0) + cost
    latest = max((minute for minute, _, _ in past), default=0)
    now_ms = T + (latest + later) * 60_000 + elapsed_ms
    sequence = now_ms // 60_000
    old = LedgerRow("default", "default", "a", 60_000, sequence - 2, "iad", 40, sequence * 60_000)
    node.ledger_sync.apply_import([old], now_ms)

    replay = node.origin_sync.plan_replay(now_ms, 100)
    for component in [] if replay is None else replay.components:
        assert component.sequence >= sequence - 2 and component.expires_at_ms > now_ms
    publication = node.plan_publish(now_ms)
    for row in [] if publication is None else publication.rows:
        assert row.sequence >= sequence - 1 and row.expires_at_ms > now_ms
    for identifier in IDENTIFIERS:
        alive = {one: count for one, count in counted.get(identifier, {}).items() if one >= sequence - 1}
        answer = node.engine.decide(LIMIT, identifier, 1, now_ms, DEGRADED)
        assert isinstance(answer, Decision)
        assert answer.effective == oracle.effective(alive, 1, now_ms, 60_000)
    for subject in node.engine.subjects.slots:
        if subject is not None:
            subject.drop_aged(now_ms, 60_000)
            assert all(cell.sequence >= sequence - 2 for cell in subject.cells())
