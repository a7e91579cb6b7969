"""One engine against a simple model, under everything that can happen to it at once.

The model is a dictionary: what is own, what others have, what each foreign region has, by subject and sequence, and
the oracle's formula over it. The machine covers time that runs and steps back, reads and replays that are answered,
overtaken, repeated and lost, imports, publications, an origin that loses its data, and a memory of four subjects.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.core import oracle
from tests.core.nodes import DictLedger, DictOrigin, Node
from tidegate.core.cells import BLOCKED, CLEAN, PINNED, Cell, Subject
from tidegate.core.freshness import Need
from tidegate.core.ledger_sync import Publication
from tidegate.core.model import (
    DEGRADED,
    ORIGIN,
    Component,
    Decision,
    LedgerRow,
    Limit,
    OriginReply,
    Request,
    Tuning,
    subject_digest,
)
from tidegate.core.origin_sync import Replay

SUBJECTS_MAX = 4
START_MS = 60_000 * 1_000

identifiers = st.sampled_from(["a", "b", "c", "d", "e", "f"])
durations_ms = st.sampled_from([1_000, 60_000])
limits = st.builds(
    Limit, st.sampled_from([3, 10, 40]), duration_ms=durations_ms, namespace=st.just("default")
)
costs = st.integers(0, 12)
spans_ms = st.integers(0, 400) | st.integers(0, 6_000) | st.integers(0, 250_000)
Key = tuple[str, int]


@dataclass
class ModelCell:
    own: int = 0
    others: int = 0
    components: dict[str, int] = field(default_factory=dict)

    def total(self) -> int:
        return self.own + self.others + sum(self.components.values())


@dataclass(frozen=True)
class Standing:
    """How well a subject was protected before something happened."""

    queue: int
    strict_until_ms: int


class EngineMachine(RuleBasedStateMachine):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        tuning = Tuning(subjects_max=SUBJECTS_MAX, touch_ms=1, anticipation=False)
        self.node = Node("n1", tuning=tuning, has_ledger=True)
        self.engine = self.node.engine
        self.sweep = self.node.sweep
        self.origin_sync = self.node.origin_sync
        self.ledger_sync = self.node.ledger_sync
        self.origin = DictOrigin()
        self.ledger = DictLedger()
        self.now_ms = START_MS
        self.latest_ms = START_MS
        self.has_stepped_back = False
        self.model: dict[Key, dict[int, ModelCell]] = {}
        self.peers: dict[tuple[bytes, int], int] = {}
        self.needs: list[tuple[Need, list[OriginReply]]] = []
        self.replays: list[Replay] = []
        self.answered: list[tuple[Replay, list[OriginReply]]] = []
        self.publications: list[Publication] = []
        self.seen: dict[int, tuple[Cell, tuple[int, ...]]] = {}
        self.strict: dict[int, tuple[Subject, int]] = {}
        self.before: dict[Key, Standing] = {}
        self.expired_before = 0

    # -- the model

    def cell(self, key: Key, sequence: int) -> ModelCell:
        return self.model.setdefault(key, {}).setdefault(sequence, ModelCell())

    def history(self, key: Key) -> dict[int, int]:
        return {sequence: cell.total() for sequence, cell in self.model.get(key, {}).items()}

    def learn(self, key: Key, sequence: int, others: int, component: int) -> None:
        if not self.remembered(key, sequence):
            return
        cell = self.cell(key, sequence)
        if component > cell.own:
            cell.own += component
        cell.others = max(cell.others, others)

    def remembered(self, key: Key, sequence: int) -> bool:
        subject = self.engine.subjects.find(("default", "default", key[1]), key[0])
        return subject is not None and subject.cell(sequence) is not None

    def key_of(self, subject: Subject) -> Key:
        return subject.identifier, self.engine.subjects.key_of(subject)[2]

    def subjects(self) -> dict[Key, Subject]:
        return {
            self.key_of(subject): subject for subject in self.engine.subjects.slots if subject is not None
        }

    def begin(self) -> None:
        """Note the protection of every subject, before something happens that may evict one."""
        self.expired_before = self.engine.subjects.expired
        self.before = {
            key: Standing(subject.queue, subject.strict_until_ms) for key, subject in self.subjects().items()
        }

    def end(self) -> None:
        """Forget what the engine forgot, if it had to; everything else must still be there."""
        present = self.subjects()
        gone = [key for key in self.before if key not in present]
        for key in gone:
            self.check_eviction(key, present)
        for key in list(self.model):
            subject = present.get(key)
            if subject is None:
                # A batch can be larger than the memory: then it evicts subjects that it has created.
                is_known = key in gone or key not in self.before
                assert is_known or not any(cell.total() for cell in self.model[key].values())
                del self.model[key]
                continue
            for sequence in [one for one in self.model[key] if subject.cell(one) is None]:
                aged_out = (sequence + 3) * key[1] <= self.latest_ms
                assert aged_out or self.model[key][sequence].total() == 0, (key, sequence)
                del self.model[key][sequence]

    def check_eviction(self, key: Key, present: dict[Key, Subject]) -> None:
        """A subject that was evicted belonged to the largest table, and was no better protected than others of it."""
        aged_out = all((sequence + 3) * key[1] <= self.latest_ms for sequence in self.model.get(key, {}))
        if self.engine.subjects.expired > self.expired_before and aged_out:
            return
        victim = self.before[key]
        stayed = [
            subject for other, subject in present.items() if other in self.before and other[1] == key[1]
        ]
        sizes = Counter(duration_ms for _, duration_ms in present)
        assert sizes[key[1]] + 1 >= max(sizes.values())
        blocked = {other for other, standing in self.before.items() if standing.queue == BLOCKED}
        blocked |= {other for other, subject in present.items() if subject.queue == BLOCKED}
        if victim.queue == PINNED:
            assert all(other.queue == PINNED for other in stayed)
        elif victim.queue == BLOCKED and victim.strict_until_ms > self.now_ms:
            is_half = 2 * sum(duration_ms == key[1] for _, duration_ms in blocked) > sizes[key[1]]
            assert is_half or all(
                other.queue == PINNED or (other.queue == BLOCKED and other.strict_until_ms > self.now_ms)
                for other in stayed
            )

    # -- time

    @rule(span_ms=spans_ms)
    def time_passes(self, span_ms: int) -> None:
        self.now_ms += span_ms
        self.latest_ms = max(self.latest_ms, self.now_ms)

    @rule(span_ms=spans_ms)
    def time_steps_back(self, span_ms: int) -> None:
        self.now_ms -= span_ms
        self.has_stepped_back = True
        self.seen.clear()

    @rule(looks=st.integers(1, 5))
    def aged_cells_expire(self, looks: int) -> None:
        self.begin()
        expired = self.engine.subjects.expired
        self.engine.subjects.expire(self.now_ms, looks)
        assert self.engine.subjects.expired <= expired + looks
        self.end()

    # -- decisions

    def expect(self, decision: Decision, limit: Limit, identifier: str, cost: int) -> None:
        key = (identifier, limit.duration_ms)
        history = self.history(key)
        used = oracle.effective(history, cost, self.now_ms, limit.duration_ms)
        assert decision.effective == used
        assert decision.allowed == (used <= limit.quota)
        assert decision.remaining == max(0, limit.quota - used)
        assert decision.retry_after_ms == oracle.retry_after_ms(
            history, cost, limit.quota, self.now_ms, limit.duration_ms
        )
        if decision:
            self.cell(key, self.now_ms // limit.duration_ms).own += cost

    @rule(identifier=identifiers, limit=limits, cost=costs, read=st.sampled_from(["answer", "fail", "late"]))
    def a_request_arrives(self, identifier: str, limit: Limit, cost: int, read: str) -> None:
        key = (identifier, limit.duration_ms)
        self.begin()
        dirty = len(self.engine.pending.dirty)
        answer = self.engine.decide(limit, identifier, cost, self.now_ms)
        self.end()
        if isinstance(answer, Need):
            used = oracle.effective(self.history(key), cost, self.now_ms, limit.duration_ms)
            assert used <= limit.quota, "a local denial needs no read"
            source = self.read(answer, read)
            self.begin()
            dirty = len(self.engine.pending.dirty)
            decided = self.engine.decide(limit, identifier, cost, self.now_ms, source)
            assert isinstance(decided, Decision)
            answer = decided
            self.end()
        assert isinstance(answer, Decision)
        self.expect(answer, limit, identifier, cost)
        if cost == 0 or not answer:
            # Evicted subjects may leave the queue; none is added.
            assert len(self.engine.pending.dirty) <= dirty
        assert self.engine.subjects.count <= SUBJECTS_MAX

    def read(self, need: Need, how: str) -> int:
        replies = self.origin.read(need.wanted)
        if how == "answer":
            self.deliver_read(need, replies)
            return ORIGIN
        self.origin_sync.apply_read_failure(need, self.now_ms)
        if how == "late":
            self.needs.append((need, replies))
        return DEGRADED

    def deliver_read(self, need: Need, replies: list[OriginReply]) -> None:
        self.origin_sync.apply_read(need, replies, self.now_ms)
        if need.subject.table >= 0:
            key = self.key_of(need.subject)
            for wanted, answer in zip(need.wanted, replies, strict=True):
                # A previous cell that was created for the read is kept from now on, if it holds something.
                self.learn(key, wanted.sequence, answer.total - answer.component, answer.component)

    @rule(batch=st.lists(st.tuples(identifiers, limits, costs), min_size=1, max_size=4))
    def a_batch_arrives(self, batch: list[tuple[str, Limit, int]]) -> None:
        requests = [Request(limit, identifier, cost) for identifier, limit, cost in batch]
        self.begin()
        decisions, needs = self.engine.decide_many(requests, self.now_ms)
        if decisions is None:
            for need in needs:
                self.origin_sync.apply_read_failure(need, self.now_ms)
            decisions, _ = self.engine.decide_many(requests, self.now_ms, DEGRADED)
        assert decisions is not None
        whole: dict[Key, int] = {}
        for identifier, limit, cost in batch:
            key = (identifier, limit.duration_ms)
            whole[key] = whole.get(key, 0) + cost
        passed = all(
            oracle.effective(
                self.history((identifier, limit.duration_ms)),
                whole[identifier, limit.duration_ms],
                self.now_ms,
                limit.duration_ms,
            )
            <= limit.quota
            for identifier, limit, _ in batch
        )
        assert all(decisions) == passed
        if passed:
            for (identifier, duration_ms), cost in whole.items():
                self.cell((identifier, duration_ms), self.now_ms // duration_ms).own += cost
        assert self.engine.subjects.count <= SUBJECTS_MAX
        self.end()

    # -- the origin

    @rule(identifier=identifiers, duration_ms=durations_ms, cost=st.integers(1, 9))
    def a_peer_counts(self, identifier: str, duration_ms: int, cost: int) -> None:
        digest = subject_digest("default", "default", identifier, duration_ms)
        sequence = self.now_ms // duration_ms
        own = self.peers.get((digest, sequence), 0) + cost
        self.peers[digest, sequence] = own
        self.origin.merge([Component(digest, sequence, "peer", own, (sequence + 3) * duration_ms)])

    @precondition(lambda self: self.needs)
    @rule(data=st.data(), again=st.booleans())
    def a_late_read_is_answered(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.needs) - 1))
        self.deliver_read(*self.needs[index])
        if not again:
            del self.needs[index]

    @rule(cells_max=st.integers(1, 3))
    def a_replay_is_sent(self, cells_max: int) -> None:
        replay = self.origin_sync.plan_replay(self.now_ms, cells_max)
        if replay is not None:
            assert all(component.own > 0 for component in replay.components)
            assert {component.writer.partition("~")[0] for component in replay.components} == {"n1"}
            self.replays.append(replay)

    @precondition(lambda self: self.replays)
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives and stays on the wire", "is lost"]))
    def a_replay_reaches_the_origin(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.replays) - 1))
        replay = self.replays[index]
        if fate == "is lost":
            del self.replays[index]
            self.origin_sync.fail_replay(replay)
            return
        self.answered.append((replay, self.origin.merge(replay.components)))
        if fate == "arrives":
            del self.replays[index]

    @precondition(lambda self: self.answered)
    @rule(data=st.data(), again=st.booleans())
    def a_replay_is_answered(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.answered) - 1))
        replay, replies = self.answered[index]
        for subject, cell, sent, answer in zip(
            replay.subjects, replay.cells, replay.components, replies, strict=True
        ):
            if subject.table >= 0 and subject.cell(cell.sequence) is cell:
                others = answer.total - max(answer.component, sent.own)
                self.learn(self.key_of(subject), cell.sequence, others, answer.component)
        self.origin_sync.apply_replay(replay, replies, self.now_ms)
        if not again:
            del self.answered[index]

    @rule()
    def the_origin_forgets_everything(self) -> None:
        self.origin.cells.clear()
        self.peers.clear()

    @rule(slots=st.integers(1, 4))
    def a_sweep_continues(self, slots: int) -> None:
        self.sweep.run(slots)

    # -- the ledger

    @rule(
        identifier=identifiers,
        region=st.sampled_from(["fra", "iad", "syd"]),
        ahead=st.integers(-1, 2),
        regional=st.integers(1, 30),
        full=st.booleans(),
    )
    def a_row_is_imported(self, identifier: str, region: str, ahead: int, regional: int, full: bool) -> None:
        sequence = self.now_ms // 60_000 + ahead
        expires_at_ms = (sequence + 2) * 60_000
        row = LedgerRow("default", "default", identifier, 60_000, sequence, region, regional, expires_at_ms)
        self.begin()
        if full:
            self.ledger_sync.begin_full_import()
        self.ledger_sync.apply_import([row], self.now_ms, full=full)
        self.ledger_sync.finish_import(self.now_ms, full=full)
        self.end()
        if not self.remembered((identifier, 60_000), sequence):
            return  # the memory is full: an import evicts nothing
        if region == "fra":
            cell = self.cell((identifier, 60_000), sequence)
            cell.others = max(cell.others, regional - cell.own)
        else:
            components = self.cell((identifier, 60_000), sequence).components
            components[region] = max(components.get(region, 0), regional)

    @rule(pressed_only=st.booleans())
    def a_publication_is_sent(self, pressed_only: bool) -> None:
        publication = self.node.plan_publish(self.now_ms, pressed_only=pressed_only)
        if publication is None:
            return
        for row in publication.rows:
            cell = self.model[row.identifier, row.duration_ms][row.sequence]
            assert row.region == "fra"
            assert row.duration_ms == 60_000
            assert 0 < row.regional == cell.own + cell.others, "only what this region accepted is published"
        self.publications.append(publication)

    @precondition(lambda self: self.publications)
    @rule(data=st.data(), fate=st.sampled_from(["stands", "fails", "is refused"]))
    def a_publication_ends(self, data: st.DataObject, fate: str) -> None:
        publication = self.publications.pop(data.draw(st.integers(0, len(self.publications) - 1)))
        end = len(publication.rows)
        if fate == "stands":
            self.ledger.publish(publication.rows)
            self.ledger_sync.apply_publish(publication, 0, end, self.now_ms)
        elif fate == "fails":
            self.ledger_sync.fail_publish(publication, 0, end)
        else:
            self.ledger_sync.set_aside(publication, 0, self.now_ms)
            self.ledger_sync.fail_publish(publication, 1, end)

    @rule(regions=st.integers(1, 12))
    def regions_come_and_go(self, regions: int) -> None:
        self.ledger_sync.apply_regions(regions)

    # -- what must hold at all times

    @invariant()
    def the_engine_holds_what_the_model_holds(self) -> None:
        for key, subject in self.subjects().items():
            for cell in subject.cells():
                expected = self.model.get(key, {}).get(cell.sequence, ModelCell())
                assert (cell.own, cell.others) == (expected.own, expected.others), (key, cell.sequence)
                components = {} if cell.ledger is None else cell.ledger.components or {}
                assert components == expected.components
                assert cell.foreign == sum(expected.components.values())

    @invariant()
    def counts_and_deadlines_only_rise_within_a_cell(self) -> None:
        for subject in self.subjects().values():
            for cell in subject.cells():
                origin, ledger = cell.origin, cell.ledger
                assert origin is not None
                deadlines = (origin.fresh_until_ms, origin.answered_at_ms, origin.failed_until_ms)
                now = (
                    cell.own,
                    cell.others,
                    cell.foreign,
                    # A clock that steps back begins with new deadlines.
                    *((0, 0, 0) if self.has_stepped_back else deadlines),
                    0 if ledger is None else ledger.set_aside_until_ms,
                )
                _, before = self.seen.get(id(cell), (cell, now))
                assert all(later >= earlier for earlier, later in zip(before, now, strict=True))
                self.seen[id(cell)] = (cell, now)
            _, strict_until_ms = self.strict.get(id(subject), (subject, 0))
            assert subject.strict_until_ms >= strict_until_ms
            self.strict[id(subject)] = (subject, subject.strict_until_ms)

    @invariant()
    def memory_is_consistent(self) -> None:
        subjects = self.engine.subjects
        present = self.subjects()
        assert subjects.count == len(present)
        for table in subjects.tables.values():
            for number in (CLEAN, BLOCKED, PINNED):
                queue = table.queue(number)
                slots = []
                slot, older = queue.oldest, -1
                while slot >= 0:
                    subject = subjects.slots[slot]
                    assert subject is not None and subject.table == table.number
                    assert subject.queue == number and subject.older == older
                    slots.append(slot)
                    older, slot = slot, subject.newer
                assert queue.newest == older and queue.length == len(slots)
            assert table.count == table.clean.length + table.blocked.length + table.pinned.length
        sizes = [table.count for table in subjects.tables.values()]
        assert {table.count for table in subjects._by_size.largest()} == set(sizes and [max(sizes)])
        for subject in present.values():
            assert subjects._buckets[subject.bucket][subject.position] is subject
        assert sum(len(bucket) for bucket in subjects._buckets.values()) == subjects.count
        assert sum(table.count for table in subjects.tables.values()) == subjects.count
        assert sum(len(subject.cells()) for subject in present.values()) == subjects.cells

    @invariant()
    def unacknowledged_counts_are_pinned_and_queued(self) -> None:
        flying = {id(cell) for replay in self.replays for cell in replay.cells}
        flying |= {id(cell) for replay, _ in self.answered for cell in replay.cells}
        queued = {id(subject) for subject in self.engine.pending.dirty}
        for (_, duration_ms), subject in self.subjects().items():
            assert not subject.is_dirty or (id(subject) in queued and subject.queue == PINNED)
            for cell in subject.cells():
                is_live = (cell.sequence + 3) * duration_ms > self.latest_ms
                if is_live and cell.is_unreplayed():
                    assert subject.is_dirty or id(cell) in flying
                    assert subject.queue == PINNED


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=50)
