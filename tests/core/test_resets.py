"""Resets in the core: names of cells, and nodes around one origin under random histories."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.nodes import DictOrigin
from tidegate import Limit, Tuning
from tidegate.core.engine import Engine
from tidegate.core.generations import CELLS, cell_name, cell_of, reset_expires_at_ms
from tidegate.core.ledger_sync import LedgerSync
from tidegate.core.model import ORIGIN, Decision, LedgerRow
from tidegate.core.origin_sync import OriginSync, Replay
from tidegate.core.resets import RESETS_BYTES_MAX, Reset, reset_bytes
from tidegate.core.sweep import Sweep

MINUTE_MS = 60_000
EPOCH_MS = 1_700_000_040_000
MANY = Limit(1_000_000, duration_ms=MINUTE_MS, namespace="tests")

durations = st.sampled_from([1_000, 5_000, MINUTE_MS, 86_400_000, 31_536_000_000])
instants = st.integers(1_000_000_000_000, 4_000_000_000_000)


# -- names


@given(durations, instants, st.integers(-40, 40))
def test_a_name_says_its_cell_and_its_generation(duration_ms: int, generation: int, behind: int) -> None:
    sequence = max(0, generation // duration_ms + behind)
    name = cell_name(sequence, generation, duration_ms)
    is_concerned = -CELLS + 2 <= sequence - generation // duration_ms <= 1
    assert cell_of(name, duration_ms) == (sequence, generation if is_concerned else 0)
    assert (name < 0) is is_concerned
    assert -(2**63) < name < 2**63
    assert cell_name(sequence, 0, duration_ms) == sequence


@given(durations, instants, instants, st.integers(-3, 3))
def test_two_generations_share_no_name_of_a_cell_that_both_concern(
    duration_ms: int, first: int, second: int, behind: int
) -> None:
    sequence = first // duration_ms + behind
    names = {cell_name(sequence, generation, duration_ms) for generation in (first, second)}
    assert len(names) == 2 or first == second or names == {sequence}


@given(durations, instants, st.integers(0, 10))
def test_when_a_reset_expires_no_cell_that_it_concerns_counts_any_more(
    duration_ms: int, generation: int, later: int
) -> None:
    now_ms = reset_expires_at_ms(generation, duration_ms) + later * duration_ms // 3
    for sequence in (now_ms // duration_ms, now_ms // duration_ms - 1):
        assert cell_name(sequence, generation, duration_ms) == sequence


# -- the table


def engine(**tuning: int | bool) -> Engine:
    return Engine(
        Tuning(credit=False, anticipation=False, **tuning), node_id="n", has_origin=True, has_ledger=True
    )


@given(st.permutations([3, 1, 2, 3, 1]))
def test_the_latest_of_several_resets_counts_in_any_order(generations: list[int]) -> None:
    node = engine()
    for each in generations:
        node.resets.apply(Reset("default", "tests", "x", MINUTE_MS, EPOCH_MS + each), EPOCH_MS)
    assert node.resets.generation_of(MANY.key, "x") == EPOCH_MS + 3
    assert node.resets.live() == [Reset("default", "tests", "x", MINUTE_MS, EPOCH_MS + 3)]


def test_a_second_reset_in_the_same_millisecond_is_another_one() -> None:
    node = engine()
    first = node.resets.make(MANY, "x", EPOCH_MS)
    second = node.resets.make(MANY, "x", EPOCH_MS)
    third = node.resets.make(MANY, "x", EPOCH_MS - 5_000)
    assert [first.generation, second.generation, third.generation] == [EPOCH_MS, EPOCH_MS + 1, EPOCH_MS + 2]


def test_what_has_expired_is_forgotten_and_its_room_is_free() -> None:
    node = engine()
    node.resets.make(MANY, "x", EPOCH_MS)
    assert node.resets.budget.bytes > 0
    node.resets.expire(reset_expires_at_ms(EPOCH_MS, MINUTE_MS) - 1)
    assert len(node.resets) == 1
    node.resets.expire(reset_expires_at_ms(EPOCH_MS, MINUTE_MS))
    assert (len(node.resets), node.resets.budget.bytes, node.subjects.generations) == (0, 0, {})


def test_a_reset_that_is_over_is_not_applied() -> None:
    node = engine()
    old = Reset("default", "tests", "x", MINUTE_MS, EPOCH_MS)
    assert not node.resets.apply(old, reset_expires_at_ms(EPOCH_MS, MINUTE_MS))


def test_one_counter_that_is_reset_again_and_again_takes_no_more_memory() -> None:
    node = engine()
    for _ in range(10_000):
        node.resets.make(MANY, "x", EPOCH_MS)
    assert len(node.resets) == 1
    assert len(node.resets._due) <= 1_010
    node.resets.expire(reset_expires_at_ms(EPOCH_MS + 10_000, MINUTE_MS))
    assert (len(node.resets), node.resets.budget.bytes) == (0, 0)


@pytest.mark.parametrize("generation", [0, -5, 2**53, 2**62])
def test_a_generation_that_is_no_time_is_ignored(generation: int) -> None:
    node = engine()
    damaged = LedgerRow("default", "tests", "x", MINUTE_MS, -1, "nyc", generation, EPOCH_MS * 2)
    tuning = Tuning(credit=False)
    sweep = Sweep(node.subjects, node.pending, node.global_view, has_credit=False)
    LedgerSync(node, sweep, tuning, "fra").apply_import([damaged], EPOCH_MS)
    assert (len(node.resets), node.subjects.count) == (0, 0)


def test_resets_that_other_nodes_make_never_take_more_than_twice_the_bound() -> None:
    node = engine()
    number = 0
    while node.resets.dropped < 10:
        node.resets.apply(Reset(f"w{number}", "n", "x" * 512, 86_400_000, EPOCH_MS), EPOCH_MS)
        number += 1
    assert RESETS_BYTES_MAX < node.resets.budget.bytes <= 2 * RESETS_BYTES_MAX


@pytest.mark.parametrize("name", ["{}", "{:0500}"])
def test_a_reset_takes_no_more_memory_than_is_counted(name: str) -> None:
    node = engine()
    tracemalloc.start()
    try:
        for number in range(2_000):
            node.resets.make(MANY, name.format(number), EPOCH_MS)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= node.resets.budget.bytes
    assert node.resets.budget.bytes == sum(reset_bytes(each) for each in node.resets.live())


# -- histories


class Node:
    """A node whose messages are delivered late, twice, in another order or never."""

    def __init__(self, name: str, region: str) -> None:
        tuning = Tuning(credit=False, anticipation=False)
        self.engine = Engine(tuning, node_id=name, has_origin=True, has_ledger=True)
        sweep = Sweep(self.engine.subjects, self.engine.pending, self.engine.global_view, has_credit=False)
        self.sweep = sweep
        self.origin_sync = OriginSync(self.engine, sweep, tuning)
        self.ledger_sync = LedgerSync(self.engine, sweep, tuning, region)
        self.region = region

    def accept(self, now_ms: int) -> int:
        """Count one request; returns the generation under which it was counted."""
        decision = self.engine.decide(MANY, "x", 1, now_ms, ORIGIN, now_ms, now_ms)
        assert isinstance(decision, Decision) and decision
        return self.engine.resets.generation_of(MANY.key, "x")

    def known(self) -> int:
        subject = self.engine.subjects.find(MANY.key, "x")
        return 0 if subject is None else sum(cell.total() for cell in subject.cells())


class World:
    """Two regions of two nodes. What was counted is known by generation."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_ms = EPOCH_MS + random.randrange(MINUTE_MS)
        self.origins = {"fra": DictOrigin(), "nyc": DictOrigin()}
        self.nodes = [Node(f"{region}{number}", region) for region in ("fra", "nyc") for number in (1, 2)]
        self.rows: dict[tuple[object, ...], LedgerRow] = {}
        self.counted: dict[int, int] = {}
        self.made: list[Reset] = []
        # Deliveries that are under way, and those that may come again.
        self.late: list[Callable[[], object]] = []

    def step(self) -> None:
        node = self.random.choice(self.nodes)
        steps: list[Callable[[Node], None]] = [self.accept, self.accept, self.accept]
        steps += [self.replay, self.publish, self.read]
        steps += [self.deliver, self.reset, self.read_resets, self.wipe, self.pass_time]
        self.random.choice(steps)(node)
        self.check()

    def accept(self, node: Node) -> None:
        generation = node.accept(self.now_ms)
        self.counted[generation] = self.counted.get(generation, 0) + 1

    def pass_time(self, _node: Node) -> None:
        self.now_ms += self.random.randrange(2_000)

    def reset(self, node: Node) -> None:
        self.made.append(node.engine.resets.make(MANY, "x", self.now_ms))

    def read_resets(self, node: Node) -> None:
        if self.made:
            node.engine.resets.apply(self.random.choice(self.made), self.now_ms)

    def replay(self, node: Node) -> None:
        replay = node.origin_sync.plan_replay(self.now_ms, 100)
        if replay is not None:
            self.send(lambda: self.merge(node, replay))

    def merge(self, node: Node, replay: Replay) -> None:
        replies = self.origins[node.region].merge(replay.components)
        self.send(lambda: node.origin_sync.apply_replay(replay, replies, self.now_ms))

    def publish(self, node: Node) -> None:
        subject = node.engine.subjects.find(MANY.key, "x")
        if subject is None:
            return
        key = node.engine.subjects.key_of(subject)
        rows = [node.ledger_sync._row_of(subject, cell, key) for cell in subject.cells()]

        def arrive() -> None:
            for row in rows:
                held = self.rows.get(row[:6])
                if held is None or row.regional > held.regional:
                    self.rows[row[:6]] = row

        self.send(arrive)

    def read(self, node: Node) -> None:
        rows = list(self.rows.values())
        self.send(lambda: node.ledger_sync.apply_import(rows, self.now_ms))

    def wipe(self, node: Node) -> None:
        if self.random.random() < 0.3:
            self.origins[node.region].cells.clear()
            for each in self.nodes:
                if each.region == node.region:
                    each.sweep.start_heal()
                    each.sweep.run(1_000)

    def send(self, delivery: Callable[[], object]) -> None:
        self.late.append(delivery)
        if self.random.random() < 0.5:
            self.deliver(self.nodes[0])

    def deliver(self, _node: Node) -> None:
        if self.late:
            delivery = self.random.choice(self.late)
            if self.random.random() < 0.8:
                self.late.remove(delivery)
            delivery()

    def check(self) -> None:
        """No node knows of more than was counted in its generation: what was counted before does not come back."""
        for node in self.nodes:
            generation = node.engine.resets.generation_of(MANY.key, "x")
            assert node.known() <= self.counted.get(generation, 0), f"{node.region}: generation {generation}"

    def settle(self) -> None:
        """All messages arrive; every node learns of the last reset, and of every count since."""
        for _ in range(6):
            for node in self.nodes:
                for reset in self.made:
                    node.engine.resets.apply(reset, self.now_ms)
                node.sweep.start_heal()
                node.sweep.run(1_000)
                self.replay(node)
                self.drain()
            for node in self.nodes:
                self.publish(node)
                self.drain()
            for node in self.nodes:
                self.read(node)
                self.drain()

    def drain(self) -> None:
        while self.late:
            self.late.pop(0)()


@given(st.integers(0, 2**32))
def test_counts_of_before_a_reset_never_come_back_and_those_after_it_are_exact(seed: int) -> None:
    world = World(Random(seed))
    for _ in range(80):
        world.step()
    world.settle()
    world.check()
    last = max((reset.generation for reset in world.made), default=0)
    for node in world.nodes:
        assert node.engine.resets.generation_of(MANY.key, "x") == last
        assert node.known() == world.counted.get(last, 0)
