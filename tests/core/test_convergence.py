"""Several nodes and regions, random schedules, and every fault of the shared parts; then all links work again.

After that, every node of every region holds exactly what was accepted. The origins and the ledger are dictionaries that
merge with max; the loops of the runtime and the simulator execute the same plans.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.nodes import DictOrigin, Node
from tests.core.worlds import ANY, LIMIT, START_MS, Event, World, run, schedules
from tidegate.core.model import Limit, Tuning, subject_digest


@given(schedules(World.break_origin, World.repair_origin, World.break_ledger, World.repair_ledger))
@settings(max_examples=150)
def test_invariant_08_after_outages_every_node_of_every_region_holds_what_was_accepted(
    schedule: list[Event],
) -> None:
    world = World()
    run(world, schedule)
    world.heal()
    world.check()


@given(
    schedules(
        World.wipe_origin,
        World.copy_origin,
        World.fail_over_origin,
        World.wipe_ledger,
        World.copy_ledger,
        World.restore_ledger,
        World.break_origin,
        World.repair_origin,
    )
)
@settings(max_examples=200)
def test_invariant_08_after_wipes_and_older_copies_every_node_holds_what_was_accepted(
    schedule: list[Event],
) -> None:
    world = World()
    run(world, schedule)
    world.heal()
    world.check()


@given(schedules(World.crash, World.break_origin, World.repair_origin))
@settings(max_examples=150)
def test_invariant_08_a_crash_loses_what_the_origin_had_not_received_and_nothing_else(
    schedule: list[Event],
) -> None:
    world = World()
    run(world, schedule)
    # Answers to messages of a crashed node are never read.
    world.answers = [one for one in world.answers if one[0] in world.nodes]
    assert all(count >= 0 for count in world.truth.values()), "more was lost than accepted"
    world.heal()
    for identifier, sequence in world.live_cells():
        for node in world.nodes:
            cell = node.subject(LIMIT, identifier).cell(sequence)
            # Other nodes and the ledger may know counts from a node that then crashed.
            assert (0 if cell is None else cell.regional()) >= world.truth[node.region, identifier, sequence]
            digest = subject_digest("default", "default", identifier, LIMIT.duration_ms)
            held = world.origins[node.region].total(digest, sequence)
            assert held == world.truth[node.region, identifier, sequence]


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 4), st.booleans()),
        min_size=20,
        max_size=80,
    )
)
@settings(max_examples=150)
def test_eviction_and_return_of_subjects_never_lose_counts_at_the_origin(
    uses: list[tuple[int, int, int, bool]],
) -> None:
    """Two nodes with room for two subjects each take turns on six; what is acknowledged is only a cache."""
    tuning = Tuning(subjects_max=2, touch_ms=1, anticipation=False)
    origin = DictOrigin()
    nodes = [Node(f"n{i}", tuning=tuning) for i in range(2)]
    truth: defaultdict[str, int] = defaultdict(int)
    now_ms = START_MS
    for who, which, cost, replays in uses:
        node, identifier = nodes[who], f"id{which}"
        now_ms += 10
        if node.limit(LIMIT, identifier, cost, now_ms, origin):
            truth[identifier] += cost
        if replays or sum(1 for subject in node.engine.subjects.slots if subject and subject.is_dirty) == 2:
            node.replay(origin, now_ms)
    for node in nodes:
        node.replay(origin, now_ms)
        assert node.engine.subjects.evicted_unreplayed == 0
    for identifier, accepted in truth.items():
        for node in nodes:
            decision = node.limit(ANY, identifier, 0, now_ms + 6_000, origin)
            assert decision.effective == accepted


def test_nodes_of_a_region_agree_within_a_round_trip() -> None:
    origin = DictOrigin()
    nodes = [Node(f"n{i}") for i in range(3)]
    for node in nodes:
        node.limit(LIMIT, "a", 0, START_MS, origin)
    for i, node in enumerate(nodes):
        node.limit(LIMIT, "a", 10 + i, START_MS, origin)
        node.replay(origin, START_MS)
    # One more unit each: the answer to that replay contains all counts.
    for node in nodes:
        node.limit(LIMIT, "a", 1, START_MS + 10, origin)
    for node in nodes:
        node.replay(origin, START_MS + 10)
    assert [node.cell(LIMIT, "a", 1000).total() for node in nodes] == [34, 35, 36]
    assert origin.total(subject_digest("default", "default", "a", LIMIT.duration_ms), 1000) == 36


@given(st.integers(1, 12), st.integers(1, 200), st.data())
def test_invariant_09_silent_regions_together_hold_at_most_half_of_the_limit(
    regions: int, quota: int, data: st.DataObject
) -> None:
    """Each region accepts requests of any cost for as long as it has nothing to publish."""
    limit = Limit(quota, duration_ms=60_000, namespace="default")
    held = 0
    for region in range(regions):
        node = Node(f"n{region}", region=f"r{region}", has_origin=False, has_ledger=True)
        node.ledger_sync.apply_regions(regions)
        silent = 0
        for _ in range(data.draw(st.integers(0, 8))):
            cost = data.draw(st.integers(1, max(1, quota // 4)))
            if not node.decide(limit, "a", cost, START_MS):
                break
            if node.plan_publish(START_MS) is not None:
                break
            silent += cost
        held += silent
    assert 2 * held <= quota
