"""Two regions of two nodes over dictionaries, random schedules of work and faults, and the truth beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hypothesis import strategies as st

from tests.core.nodes import PLAIN, DictLedger, DictOrigin, Node
from tidegate.core.model import LedgerRow, Limit, OriginReply, Tuning
from tidegate.core.origin_sync import Replay
from tidegate.core.windows import publish_threshold

LIMIT = Limit(60, duration_ms=60_000, namespace="default")
# The limit is not part of a subject. With this one a request of cost 0 is never denied, so it always reads stale cells.
ANY = Limit(10**9, duration_ms=60_000, namespace="default")
IDENTIFIERS = ("a", "b", "c")
REGIONS = ("fra", "iad")
START_MS = 60_000 * 1_000


class World:
    """Two regions of two nodes, their origins, one ledger, and what was really accepted."""

    def __init__(self, tuning: Tuning = PLAIN) -> None:
        self.tuning = tuning
        self.now_ms = START_MS
        self.origins = {region: DictOrigin() for region in REGIONS}
        self.ledger = DictLedger()
        self.started = 0
        self.nodes = [self.start(region) for region in REGIONS for _ in range(2)]
        # (region, identifier, sequence) -> accepted and not lost in a crash
        self.truth: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self.origin_is_up = dict.fromkeys(REGIONS, True)
        self.ledger_is_up = True
        self.copies = {region: self.origins[region].copy() for region in REGIONS}
        self.ledger_copy: dict[tuple[str, str, str, int, int, str], LedgerRow] = {}
        self.flying: list[tuple[Node, Replay]] = []
        self.answers: list[tuple[Node, Replay, list[OriginReply]]] = []

    def start(self, region: str) -> Node:
        self.started += 1
        node = Node(f"{region}-{self.started}", region=region, tuning=self.tuning, has_ledger=True)
        node.ledger_sync.apply_regions(len(REGIONS))
        node.run_sweep()
        return node

    # -- events

    def request(self, node: Node, identifier: str, cost: int) -> None:
        origin = self.origins[node.region] if self.origin_is_up[node.region] else None
        if node.limit(LIMIT, identifier, cost, self.now_ms, origin):
            self.truth[node.region, identifier, self.now_ms // 60_000] += cost

    def replay(self, node: Node) -> None:
        replay = node.origin_sync.plan_replay(self.now_ms, 2)
        if replay is not None:
            self.flying.append((node, replay))

    def land(self, index: int) -> None:
        if self.flying:
            node, replay = self.flying.pop(index % len(self.flying))
            if self.origin_is_up[node.region]:
                self.answers.append((node, replay, self.origins[node.region].merge(replay.components)))
            else:
                node.origin_sync.fail_replay(replay)

    def answer(self, index: int, lost: bool) -> None:
        if self.answers:
            node, replay, replies = self.answers.pop(index % len(self.answers))
            if lost:
                node.origin_sync.fail_replay(replay)
            else:
                node.origin_sync.apply_replay(replay, replies, self.now_ms)

    def publish(self, node: Node, pressed_only: bool) -> None:
        if self.ledger_is_up:
            node.publish(self.ledger, self.now_ms, pressed_only=pressed_only)
            return
        publication = node.plan_publish(self.now_ms, pressed_only=pressed_only)
        if publication is not None:
            node.ledger_sync.fail_publish(publication, 0, len(publication.rows))

    def import_(self, node: Node) -> None:
        if self.ledger_is_up:
            node.import_all(self.ledger, self.now_ms)

    def crash(self, region: str) -> None:
        """The first node of a region crashes, with what it has not replayed and what it has in flight."""
        index = REGIONS.index(region) * 2
        node = self.nodes[index]
        held = self.origins[node.region].cells
        for subject in node.engine.subjects.slots:
            if subject is None:
                continue
            key = node.engine.subjects.key_of(subject)
            for cell in subject.cells():
                component = subject.component(cell, key, node.engine.writer_of(subject.incarnation))
                arrived = held.get((component.digest, cell.sequence), {}).get(component.writer, 0)
                self.truth[node.region, subject.identifier, cell.sequence] -= cell.own - arrived
        self.flying = [(one, replay) for one, replay in self.flying if one is not node]
        self.nodes[index] = self.start(node.region)

    # -- healing

    def heal(self) -> None:
        """Traffic has stopped and every link works: let everything run until all of it has arrived."""
        for region in REGIONS:
            self.origin_is_up[region] = True
        self.ledger_is_up = True
        while self.flying:
            self.land(0)
        while self.answers:
            self.answer(0, False)
        for _ in range(4):
            self.now_ms += 6_000
            for node in self.nodes:
                origin = self.origins[node.region]
                for identifier in IDENTIFIERS:
                    node.limit(ANY, identifier, 0, self.now_ms, origin)
                node.run_sweep(2)
                node.replay(origin, self.now_ms)
                node.publish(self.ledger, self.now_ms)
                node.import_all(self.ledger, self.now_ms)

    def live_cells(self) -> Iterator[tuple[str, int]]:
        for sequence in (self.now_ms // 60_000 - 1, self.now_ms // 60_000):
            for identifier in IDENTIFIERS:
                yield identifier, sequence

    def check(self) -> None:
        for identifier, sequence in self.live_cells():
            truth = {region: self.truth[region, identifier, sequence] for region in REGIONS}
            all_know = max(truth.values()) >= publish_threshold(LIMIT.quota, len(REGIONS))
            for node in self.nodes:
                cell = node.subject(LIMIT, identifier).cell(sequence)
                regional = 0 if cell is None else cell.regional()
                assert regional == truth[node.region], (node.engine.node_id, identifier, sequence)
                foreign = 0 if cell is None else cell.foreign
                expected = sum(truth.values()) - truth[node.region]
                assert foreign <= expected
                if all_know:
                    assert foreign == expected, (node.engine.node_id, identifier, sequence)
        for region in REGIONS:
            for identifier, sequence in self.live_cells():
                row = self.ledger.counts.get(("default", "default", identifier, 60_000, sequence, region))
                if row is not None:
                    assert row.regional <= self.truth[region, identifier, sequence]

    # -- faults

    def break_origin(self, region: str) -> None:
        self.origin_is_up[region] = False

    def repair_origin(self, region: str) -> None:
        self.origin_is_up[region] = True

    def wipe_origin(self, region: str) -> None:
        self.origins[region].cells.clear()

    def copy_origin(self, region: str) -> None:
        self.copies[region] = self.origins[region].copy()

    def fail_over_origin(self, region: str) -> None:
        self.origins[region].cells = {key: dict(held) for key, held in self.copies[region].items()}

    def break_ledger(self, _region: str) -> None:
        self.ledger_is_up = False

    def repair_ledger(self, _region: str) -> None:
        self.ledger_is_up = True

    def wipe_ledger(self, _region: str) -> None:
        self.ledger.counts.clear()

    def copy_ledger(self, _region: str) -> None:
        self.ledger_copy = dict(self.ledger.counts)

    def restore_ledger(self, _region: str) -> None:
        self.ledger.counts = dict(self.ledger_copy)


class Event(NamedTuple):
    what: str
    which: int
    identifier: str
    much: int


def schedules(*faults: Callable[[World, str], None]) -> st.SearchStrategy[list[Event]]:
    """Mostly work, and the given faults in between."""
    work = ["request"] * 4 + ["replay", "land", "answer", "tick", "press", "import", "time"]
    what = st.sampled_from(work + [fault.__name__ for fault in faults])
    event = st.builds(Event, what, st.integers(0, 11), st.sampled_from(IDENTIFIERS), st.integers(0, 9))
    return st.lists(event, min_size=20, max_size=90)


def run(world: World, schedule: list[Event]) -> None:
    for what, which, identifier, much in schedule:
        node = world.nodes[which % len(world.nodes)]
        match what:
            case "request":
                world.request(node, identifier, much)
            case "replay":
                world.replay(node)
            case "land":
                world.land(which)
            case "answer":
                world.answer(which, lost=much == 0)
            case "tick" | "press":
                world.publish(node, pressed_only=what == "press")
            case "import":
                world.import_(node)
            case "time":
                world.now_ms += much * much * 100
            case fault:
                getattr(world, fault)(node.region)
