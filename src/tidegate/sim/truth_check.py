"""Compares every answer with the truth: what it must have counted, and what it may have counted at most.

A node must know what it accepted itself, what the origin's answers contained, and what other regions had published one
import interval ago. An answer from memory must rest on an answer of the origin that is not too old, for both cells.
What a node accepts must reach the origin within a few round trips, and the ledger within a tick. All of this holds once
the links involved have worked for long enough; every other exception is counted in `excused`.

Ages are measured by the event loop: a clock that steps makes no knowledge newer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidegate.core.cells import Subject
from tidegate.core.grants import CreditRequest, GrantRules
from tidegate.core.model import Component, Decision, LedgerRow, Limit
from tidegate.core.windows import publish_threshold
from tidegate.runtime.importer import LOSS_INTERVALS
from tidegate.sim.answer_check import is_guess, totals_of, used_at
from tidegate.sim.reset_check import PROBES_WORKSPACE
from tidegate.sim.truth import CellId, CellKey, History, Knowledge, Truth, key_of

if TYPE_CHECKING:
    from tidegate.sim.node_process import NodeProcess
    from tidegate.sim.simulation import Simulation

__all__ = ["TruthCheck"]

# Clocks drift by at most 5,000 ppm in a simulation, and times are rounded to milliseconds.
DRIFT_PERCENT = 1
ROUNDING_MS = 3

# The origin forgets a node's credit this long after its last message.
CREDIT_LIFE_MS = 6_000
# With credit, in a healthy region: it is an error if more than REFUSED_MIN requests are denied because other nodes hold
# the credit, and more than one for every REFUSED_PART that are allowed. The most in 225 simulations was 2 denied and 25
# allowed; if nodes ignore recalls, 105 and 37.
REFUSED_MIN = 6
REFUSED_PART = 8
# With credit: the most components that a node sends per answer in its region.
MESSAGES_PER_ANSWER_MAX = 4


class _Held(NamedTuple):
    """A denial in a healthy region with credit that the counts of its node do not explain."""

    region: str
    cell_id: CellId
    at_ms: int
    foreign: dict[int, int]
    """By sequence: what the node knew of other regions."""
    room: int
    """What its quota leaves beside its cost."""
    then_us: int
    """When credit that had been granted to waiting requests of others was spent."""


class TruthCheck:
    """The truth of one simulation, and the checks against it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._tuning = simulation.tuning
        self.truth: Truth = simulation.auditor.truth
        self._knowledge: dict[str, Knowledge] = {}
        # (process, key, identifier) -> the last denial because of counts, and the subject that it was for.
        self._denials: dict[tuple[str, tuple[str, str, int], str], tuple[int, Subject]] = {}
        # (process, cell, the origin's last answer about it) -> the first guess after that answer.
        self._guesses: dict[tuple[str, CellId, int], int] = {}
        # (process, key, identifier) -> the subject, and when it first answered.
        self._created_s: dict[tuple[str, tuple[str, str, int], str], tuple[Subject, float]] = {}
        self._answers: Counter[str] = Counter()
        # When a region last accepted a request without an answer of its origin.
        self._degraded_s: dict[str, float] = {}
        # How often an origin lost counts, by region; the cells; and the cells whose loss shows only when they are read.
        self.losses: Counter[str] = Counter()
        self.lost: set[tuple[str, CellKey]] = set()
        self._silent_losses: dict[tuple[str, CellKey], int] = {}
        # Answers compared with the truth, answers that were not, by reason, and cells that exceeded their limit.
        self.judged = 0
        # Answers of healthy regions with credit. `exact`: allowed, and compared with a single counter. `_held`: denied
        # because of what other nodes held, or by a guess.
        self.exact = 0
        self._held: list[_Held] = []
        self.excused: Counter[str] = Counter()
        self.over_admitted: set[CellId] = set()

    # -- times

    def knowledge(self, process: NodeProcess) -> Knowledge:
        found = self._knowledge.get(process.node_id)
        if found is None:
            found = self._knowledge[process.node_id] = Knowledge()
        found.clock_max_ms = max(found.clock_max_ms, process.clock.now_ms())
        return found

    def _now_us(self) -> int:
        return self._simulation.loop.now_us()

    def _round_trip_s(self) -> float:
        conditions = self._simulation.network.conditions
        delay_ms = max(conditions.delay_ms, conditions.slow_ms if conditions.slow_percent else 0)
        return 2 * delay_ms / 1000

    def _calm_s(self, process: NodeProcess) -> float:
        """For how long the process and its link to the origin have worked; negative if they do not."""
        link = process.origin_link
        origin = self._simulation.origins[process.region]
        if process.is_paused or link.is_cut or origin.is_down or origin.is_frozen or origin.refuses_writes:
            return -1.0
        disturbed_s = max(link.disturbed_s, process.started_s, process.resumed_s, process.stepped_s)
        return self._simulation.loop.time() - disturbed_s

    def _is_undisturbed(self, process: NodeProcess) -> bool:
        """Nothing has happened to the process and its link since the simulation began."""
        disturbed_s = max(process.origin_link.disturbed_s, process.resumed_s, process.stepped_s)
        return process.number == 1 and process.is_running and disturbed_s <= 0 and self._calm_s(process) >= 0

    def _recovery_s(self) -> float:
        """How long after a fault of its origin a node may need until everything works again."""
        tuning = self._tuning
        recovery_ms = tuning.breaker_open_ms + tuning.backoff_last_ms + tuning.replay_timeout_ms
        recovery_ms += tuning.pulse_interval_ms + tuning.read_timeout_ms
        return recovery_ms / 1000 + 1

    def _ledger_calm_s(self, process: NodeProcess) -> float:
        link, ledger = process.ledger_link, self._simulation.ledger
        if process.is_paused or link.is_cut or ledger.is_down or ledger.is_frozen:
            return -1.0
        disturbed_s = max(link.disturbed_s, process.started_s, process.resumed_s, process.stepped_s)
        return self._simulation.loop.time() - max(disturbed_s, self._simulation.ledger_disturbed_s)

    def _shared_calm_s(self, process: NodeProcess) -> float:
        """The same for everything through which a node learns of other regions: with credit, another node may
        import."""
        if not self._tuning.credit:
            return self._ledger_calm_s(process)
        region = self._region(process.region)
        calm_s = min(min(self._ledger_calm_s(one), self._calm_s(one)) for one in region)
        if self.losses[process.region]:
            # What the origin has lost comes back only with a full read, which is rare.
            calm_s -= (LOSS_INTERVALS + 1) * self._tuning.import_interval_ms / 1000
        return calm_s

    def _ledger_recovery_s(self) -> float:
        tuning = self._tuning
        return (tuning.ledger_timeout_ms * 2 + tuning.breaker_open_ms + tuning.backoff_last_ms) / 1000 + 1

    # -- what is reported to it

    def replied(
        self, process: NodeProcess, components: Sequence[Component], merged: bool, asked_s: float
    ) -> None:
        """The process received an answer of the origin: it must now know what the origin held when the request was
        sent. That may be long ago, if the process was paused in between."""
        knowledge = self.knowledge(process)
        now_us = self._now_us()
        asked_us = round(asked_s * 1e6)
        for one in components:
            cell = (one.digest, one.sequence)
            knowledge.replied(cell, now_us)
            lost_us = self._silent_losses.get((process.region, cell), now_us)
            if lost_us < asked_us and knowledge.noticed_us.get(cell, 0) <= lost_us:
                knowledge.noticed_us[cell] = now_us
            if merged:
                knowledge.acknowledged[cell] = max(one.own, knowledge.acknowledged.get(cell, 0))
            duration_ms = self._simulation.auditor.cell_of(*cell).key[2]
            if self._simulation.clock.now_ms() >= (one.sequence + 3) * duration_ms:
                continue
            for writer, history in self.truth.held(process.region, cell).items():
                if writer.partition("~")[0] != process.node_id:
                    knowledge.report(cell, writer, history.lowest(asked_us, now_us))

    def sent(self, process: NodeProcess, components: Sequence[Component]) -> None:
        knowledge = self.knowledge(process)
        knowledge.sent += len(components)
        for one in components:
            if one.own <= knowledge.acknowledged.get((one.digest, one.sequence), -1):
                knowledge.repeats += 1

    def excess(self, cell_id: CellId, region: str) -> int:
        """How much more than was accepted a region may count."""
        return self._simulation.convergence.excess(region, cell_id.digest, cell_id.sequence)

    def repeated(self, process: NodeProcess, request: CreditRequest) -> None:
        """A message arrives at the origin."""
        self._simulation.convergence.record_repeat(process, request)

    def origin_lost(self, region: str) -> None:
        """The origin lost counts: read what is left."""
        self.losses[region] += 1
        memory = self._simulation.origins[region].memory
        snapshot = memory.snapshot()
        components = {cell: copy.components for cell, copy in snapshot.cells.items()}
        lost = self.truth.origin_replaced(region, components, self._now_us())
        self.lost.update((region, cell) for cell in lost)
        if snapshot.region is not None:
            self._silent_losses.update(((region, cell), self._now_us()) for cell in lost)

    def rows_visible(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            cell_id = CellId((row.workspace, row.namespace, row.duration_ms), row.identifier, row.sequence)
            self.truth.row_visible(cell_id, row.region, row.regional, self._now_us())

    # -- answers

    def decided(
        self,
        process: NodeProcess,
        items: Sequence[tuple[Limit, str, int]],
        decisions: Sequence[Decision],
        at_ms: int,
    ) -> None:
        """A node made these decisions in this step."""
        knowledge = self.knowledge(process)
        allowed = all(decision.allowed for decision in decisions)
        for (limit, identifier, cost), decision in zip(items, decisions, strict=True):
            cell_id = CellId(key_of(limit), identifier, at_ms // limit.duration_ms)
            if allowed and cost:
                self._count_over_admission(cell_id, limit, at_ms)
            subject = process.engine.subjects.find(cell_id.key, identifier)
            if subject is None:
                continue
            self.judged += 1
            self._answers[process.region] += 1
            for one in (cell_id, cell_id._replace(sequence=cell_id.sequence - 1)):
                self._check_counts(process, knowledge, decision.source, allowed, one, subject)
                self._check_foreign(process, knowledge, decision.source, allowed, one, subject)
            if is_guess(decision):
                self._check_guess(process, decision, cost, cell_id, at_ms, subject)
            elif not decision.allowed:
                self._check_denial(process, limit, decision, cell_id, at_ms, subject)
            elif allowed:
                self._check_memory(process, knowledge, decision, cell_id, at_ms, subject)
                if cost > 0:
                    self._check_exact(process, limit, decision, cell_id, at_ms)
                self._check_over_admission(process, limit, cell_id, at_ms)
            self._check_strict(process, cell_id, subject, limit)

    def _check_counts(
        self,
        process: NodeProcess,
        knowledge: Knowledge,
        source: str,
        allowed: bool,
        cell_id: CellId,
        subject: Subject,
    ) -> None:
        """The node counts what it accepted, and what the origin reported of the others (2)."""
        expires_at_ms = (cell_id.sequence + 3) * cell_id.key[2]
        if knowledge.clock_max_ms >= expires_at_ms:
            return
        if subject.incarnation and (not allowed or self._simulation.clock.now_ms() >= expires_at_ms):
            # Evicted. A denial needs no more knowledge, and the origin drops a cell that has aged out by its clock.
            return
        cell = subject.cell(cell_id.sequence)
        view = 0 if cell is None else cell.own + cell.others
        digest = cell_id.digest
        own = self.truth.by_process(cell_id, process.node_id)
        must = own + knowledge.others((digest, cell_id.sequence))
        if view >= must:
            return
        if self._simulation.convergence.is_incomplete(process.region, digest, cell_id.sequence):
            self.excused["an origin lost counts of a node that had ended"] += 1
        elif view + self._simulation.convergence.missing(process.region, digest, cell_id.sequence) >= must:
            self.excused["an origin lost counts that no running node knew of"] += 1
        elif not self._tuning.credit and (process.region, (digest, cell_id.sequence)) in self.lost:
            # A node keeps the counts of the others as one number, which hides new counts until all of them have sent
            # again.
            self.excused["an origin lost counts"] += 1
        elif process.engine.subjects.evicted_unreplayed:
            self.excused["memory was full of counts that the origin did not take"] += 1
        elif source == "degraded" and subject.incarnation:
            self.excused["evicted, and the origin did not answer"] += 1
        elif (
            (self._tuning.credit or source == "local")
            and subject.incarnation
            and not self._is_known_again(process, cell_id, subject)
        ):
            # Credit for the previous cell stays valid in this one; the origin has counted what it holds of both.
            # Without credit, a cell that begins while its subject is warm counts as empty.
            self.excused["evicted, and the window began after the origin's last answer"] += 1
        else:
            self._fail(
                2,
                f"{process.node_id} counts {view} of {cell_id} and must know {own} + {must - own} of others",
            )

    def _is_known_again(self, process: NodeProcess, cell_id: CellId, subject: Subject) -> bool:
        """The origin has answered about the cell since its subject was evicted."""
        place = (process.node_id, cell_id.key, cell_id.identifier)
        known_subject, since_s = self._created_s.get(place, (None, 0.0))
        replied_us = self.knowledge(process).replied_us((cell_id.digest, cell_id.sequence))
        return known_subject is subject and replied_us is not None and replied_us >= since_s * 1e6

    def _check_foreign(
        self,
        process: NodeProcess,
        knowledge: Knowledge,
        source: str,
        allowed: bool,
        cell_id: CellId,
        subject: Subject,
    ) -> None:
        """The node counts what other regions had published one import interval ago (8)."""
        tuning = self._tuning
        cell = subject.cell(cell_id.sequence)
        place = (process.node_id, cell_id.key, cell_id.identifier)
        known_subject, since_s = self._created_s.get(place, (None, 0.0))
        if known_subject is not subject:
            since_s = self._simulation.loop.time()
            self._created_s[place] = (subject, since_s)
        if cell_id.key[2] < tuning.ledger_duration_ms_min:
            return
        interval_ms = tuning.import_hot_interval_ms if tuning.credit else tuning.import_interval_ms
        interval_s = interval_ms / 1000 * (1 + tuning.jitter_percent / 100)
        age_s = interval_s + 3 * self._round_trip_s() + 0.1
        if tuning.credit:
            # A node that has credit need not ask before the credit expires.
            age_s += GrantRules().life_ms / 1000 * (1 + DRIFT_PERCENT / 100)
        if self._shared_calm_s(process) < age_s + self._ledger_recovery_s():
            return
        if knowledge.clock_max_ms + age_s * 1_000 >= (cell_id.sequence + 2) * cell_id.key[2]:
            return
        if tuning.credit:
            if allowed:  # a denial needs no more knowledge
                self._check_foreign_sum(process, knowledge, source, cell_id, subject, age_s)
            return
        components = None if cell is None or cell.ledger is None else cell.ledger.components
        is_small = "subjects_max" in self._simulation.plan.tuning
        for region in self._simulation.plan.regions:
            if region == process.region:
                continue
            published = self.truth.row(cell_id, region).at(self._now_us() - int(age_s * 1e6))
            known = 0 if components is None else components.get(region, 0)
            if known >= published:
                continue
            if is_small and self._simulation.loop.time() - since_s < 3 * interval_s + age_s:
                self.excused["evicted or not kept, and not imported again yet"] += 1
            else:
                self._fail(
                    8,
                    f"{process.node_id} counts {known} of region {region} in {cell_id}, published {published}",
                )

    def _check_foreign_sum(
        self,
        process: NodeProcess,
        knowledge: Knowledge,
        source: str,
        cell_id: CellId,
        subject: Subject,
        age_s: float,
    ) -> None:
        """With credit one node imports for all, and the origin knows the sum."""
        published = sum(
            self.truth.row(cell_id, region).at(self._now_us() - int(age_s * 1e6))
            for region in self._simulation.plan.regions
            if region != process.region
        )
        cell = subject.cell(cell_id.sequence)
        known = 0 if cell is None else cell.foreign
        if known >= published:
            return
        if source == "degraded" and subject.incarnation:
            # More requests wait than memory holds subjects: the answer comes after the subject was evicted.
            self.excused["evicted, and the origin did not answer"] += 1
        elif knowledge.replied_us((cell_id.digest, cell_id.sequence)) is None:
            # Credit for the previous cell stays valid in this one, and counted what others had here already.
            self.excused["the window began after the origin's last answer"] += 1
        else:
            self._fail(8, f"{process.node_id} counts {known} of others in {cell_id}, published {published}")

    def _check_guess(
        self,
        process: NodeProcess,
        decision: Decision,
        cost: int,
        cell_id: CellId,
        at_ms: int,
        subject: Subject,
    ) -> None:
        """A guess may only extend growth that was seen twice and recently, and must ask for a retry soon (7)."""
        tuning = self._tuning
        name = f"{process.node_id}: {cell_id} denied with {decision.effective} of {decision.limit.quota}"
        if tuning.credit:
            # After a clock has stepped back, later cells have counts too.
            follows = 0
            while self.truth.total(cell_id._replace(sequence=cell_id.sequence + follows + 1)):
                follows += 1
            # Other nodes hold the rest. They give it back, spend it, or lose it when it expires.
            longest_ms = max(CREDIT_LIFE_MS, (2 + follows) * cell_id.key[2])
            if not decision.retry_after_ms or decision.retry_after_ms > longest_ms:
                self._fail(7, f"{name}, retry after {decision.retry_after_ms} ms")
            is_expected = tuning.anticipation and self._has_grown(process, cell_id)
            if self.is_exact(process) and not is_expected:
                self._check_held(process, decision, cell_id, at_ms, subject)
            others = [one for one in self._simulation.all_processes if one.region == process.region]
            is_shared = cell_id.key[2] >= tuning.ledger_duration_ms_min
            is_now = cell_id.sequence == process.clock.now_ms() // cell_id.key[2]
            if len(others) > 1 or process.evictions or follows or not (is_shared and is_now):
                return
            if subject.credit is not None and subject.credit.waiting is not None:
                return  # a batch of this node holds the credit while it waits for its other counters
            if used_at(totals_of(subject), at_ms, cell_id.key[2]) + cost > decision.limit.quota:
                return  # the batch that held it was allowed in this step
            # No other node ever held credit in this region, so the node denied because of growth in other regions.
        if not tuning.anticipation:
            self._fail(7, name)
            return
        if not self._has_grown(process, cell_id):
            self._fail(7, f"{name}, and no region published it twice")
        # The first import after the last change still sees growth; the next one sees that it has stopped.
        interval_ms = tuning.import_hot_interval_ms if tuning.credit else tuning.import_interval_ms
        interval_s = interval_ms / 1000 * (1 + tuning.jitter_percent / 100)
        seen_s = 2 * interval_s + 5 * self._round_trip_s() + self._simulation.ledger.lag_ms / 1000 + 0.1
        last_us = max((row.changed_at_us for row in self._foreign_rows(process, cell_id)), default=0)
        calm_us = (self._shared_calm_s(process) - self._ledger_recovery_s()) * 1e6
        if not tuning.credit:
            has_stopped = min(calm_us, self._now_us() - last_us) > seen_s * 1e6
        else:
            # An answer shows the last change. One that comes four intervals later shows no further one, which ends the
            # growth. A counter that is used up denies without asking: the first guess after that asks.
            still_s = 4 * interval_s + 2 * self._round_trip_s()
            knowledge = self.knowledge(process)
            place = (cell_id.digest, cell_id.sequence)
            replied_us = knowledge.replied_us(place) or 0
            guess = (process.node_id, cell_id, replied_us)
            if self._now_us() - replied_us >= interval_ms * 1_000:
                # Not earlier: it has just asked.
                self._guesses.setdefault(guess, self._now_us())
            waited_us = self._now_us() - self._guesses.get(guess, self._now_us())
            shown_us = knowledge.first_reply_us(place, last_us + seen_s * 1e6)
            has_stopped = calm_us > (seen_s + still_s) * 1e6 and (
                replied_us - shown_us > still_s * 1e6 or waited_us > (seen_s + still_s) * 1e6
            )
        if has_stopped:
            self._fail(7, f"{name}, and other regions stopped {(self._now_us() - last_us) / 1e6:.3f} s ago")
        retry_ms = decision.retry_after_ms
        soon_ms = tuning.import_interval_ms * (1 + tuning.jitter_percent / 100) + tuning.ledger_timeout_ms
        if retry_ms is None or not 0 < retry_ms <= soon_ms:
            self._fail(7, f"{name}, retry after {retry_ms} ms")

    def _check_held(
        self, process: NodeProcess, decision: Decision, cell_id: CellId, at_ms: int, subject: Subject
    ) -> None:
        """In a region that works, others hold what is left; or, by the time of a request that was ahead, the next cell
        has counts, beside which all of this one weighs: then it does not fit before that cell begins (7)."""
        now_us = self._now_us()
        demand = decision.effective - used_at(totals_of(subject), at_ms, cell_id.key[2])
        trip_us = round(self._round_trip_s() * 1e6)
        if self._at_next_start(process.region, cell_id, now_us) + demand <= decision.limit.quota:
            if self._is_held_by_crashed(process.region):
                return
            foreign = {cell.sequence: cell.foreign for cell in subject.cells()}
            room = decision.limit.quota - demand
            self._held.append(_Held(process.region, cell_id, at_ms, foreign, room, now_us + trip_us))
            return
        # Every answer contains what the origin held a round trip ago.
        is_known = (
            self._at_next_start(process.region, cell_id, now_us - trip_us) + demand > decision.limit.quota
        )
        starts_ms = (cell_id.sequence + 1) * cell_id.key[2] - at_ms
        if is_known and (decision.retry_after_ms or 0) < starts_ms:
            self._fail(
                7,
                f"{process.node_id}: {cell_id} denied beside the next window, which begins in {starts_ms} ms: "
                f"retry after {decision.retry_after_ms} ms",
            )

    def _is_held_by_crashed(self, region: str) -> bool:
        """A process of the region has crashed: its credit is not given back, and ends with its life."""
        since_s = self._simulation.loop.time() - CREDIT_LIFE_MS / 1000
        return any(one.region == region and one.crashed_s > since_s for one in self._simulation.all_processes)

    def _at_next_start(self, region: str, cell_id: CellId, at_us: int) -> int:
        """What an origin counted at a time at the start of the next cell, if that had counts already."""
        counts = [
            sum(one.at(at_us) for one in self.truth.held(region, (cell_id.digest, sequence)).values())
            + sum(
                self.truth.row(cell_id._replace(sequence=sequence), other).at(at_us)
                for other in self.truth.regions_but(region)
            )
            for sequence in (cell_id.sequence, cell_id.sequence + 1)
        ]
        return sum(counts) if counts[1] else 0

    def _foreign_rows(self, process: NodeProcess, cell_id: CellId) -> list[History]:
        """What other regions have published of a cell."""
        return [
            self.truth.row(cell_id, region)
            for region in self._simulation.plan.regions
            if region != process.region
        ]

    def _has_grown(self, process: NodeProcess, cell_id: CellId) -> bool:
        """Other regions have published the cell more than once: only then can a node expect growth. With credit, nodes
        know the other regions as one sum."""
        changes = [row.changes for row in self._foreign_rows(process, cell_id)]
        return (sum(changes) if self._tuning.credit else max(changes, default=0)) >= 2

    def _check_denial(
        self,
        process: NodeProcess,
        limit: Limit,
        decision: Decision,
        cell_id: CellId,
        at_ms: int,
        subject: Subject,
    ) -> None:
        """A request is denied only because of what was accepted (7)."""
        totals = {
            sequence: self._countable(cell_id._replace(sequence=sequence))
            for sequence in (cell_id.sequence - 1, cell_id.sequence)
        }
        known = subject.cell(cell_id.sequence)
        before = subject.cell(cell_id.sequence - 1)
        used = used_at(
            {
                cell_id.sequence: 0 if known is None else known.total(),
                cell_id.sequence - 1: 0 if before is None else before.total(),
            },
            at_ms,
            limit.duration_ms,
        )
        demand = decision.effective - used
        if used_at(totals, at_ms, limit.duration_ms) + demand <= limit.quota:
            self._fail(7, f"{process.node_id}: {cell_id} denied with {decision!r}, accepted in all: {totals}")

    def _countable(self, cell_id: CellId) -> int:
        excess = sum(self.excess(cell_id, region) for region in self._simulation.plan.regions)
        return self.truth.total(cell_id) + excess

    def note_denials(
        self,
        process: NodeProcess,
        items: Sequence[tuple[Limit, str, int]],
        decisions: Sequence[Decision],
        at_ms: int,
    ) -> None:
        """Record the denials of a step that counts caused: they set strict deadlines."""
        for (limit, identifier, _), decision in zip(items, decisions, strict=True):
            subject = process.engine.subjects.find(key_of(limit), identifier)
            if subject is not None and not decision.allowed and not is_guess(decision):
                place = (process.node_id, key_of(limit), identifier)
                denied_ms, denied = self._denials.get(place, (at_ms, subject))
                self._denials[place] = (max(at_ms, denied_ms) if denied is subject else at_ms, subject)

    def _check_strict(self, process: NodeProcess, cell_id: CellId, subject: Subject, limit: Limit) -> None:
        """The strict deadline comes from the last denial that counts caused, never from a guess."""
        denied = self._denials.get((process.node_id, cell_id.key, cell_id.identifier))
        expected_ms = 0 if denied is None else denied[0] + limit.duration_ms
        if denied is not None and denied[1] is not subject:
            return
        if subject.strict_until_ms > expected_ms:
            self._fail(
                2,
                f"{process.node_id}: {cell_id} is strict until {subject.strict_until_ms}, not {expected_ms}",
            )

    def _check_memory(
        self,
        process: NodeProcess,
        knowledge: Knowledge,
        decision: Decision,
        cell_id: CellId,
        at_ms: int,
        subject: Subject,
    ) -> None:
        """An answer from memory: both cells are fresh, and the last denial is a window ago (2)."""
        if decision.source != "local" or self._tuning.credit:
            return
        duration_ms = cell_id.key[2]
        denied_ms, denied = self._denials.get(
            (process.node_id, cell_id.key, cell_id.identifier), (0, subject)
        )
        if denied is subject and at_ms < denied_ms + duration_ms:
            self._fail(2, f"{process.node_id}: allowed from memory {at_ms - denied_ms} ms after a denial")
        # A cell that began while its subject was warm was empty then.
        start_ms = cell_id.sequence * duration_ms
        if 0 <= process.clock.now_ms() - start_ms < self._tuning.rollover_grace_ms:
            return
        digest = cell_id.digest
        fresh_ms = self._tuning.fresh_ms * (1 + DRIFT_PERCENT / 100) + ROUNDING_MS
        for name, sequence, times in (
            ("this", cell_id.sequence, 1),
            ("the previous", cell_id.sequence - 1, 2),
        ):
            replied_us = knowledge.replied_us((digest, sequence))
            age_ms = None if replied_us is None else (self._now_us() - replied_us) / 1_000
            # A node cannot notice a small step back, so it may use an answer twice as long. It must notice a large one.
            is_large = -process.stepped_ms > 2 * fresh_ms + self._tuning.read_retry_ms
            stepped_us = process.stepped_s * 1e6
            if age_ms is not None and stepped_us > (replied_us or 0):
                age_ms = None if is_large else age_ms / 2
            # An answer from before the step is fresh until then, and later ones do not shorten that.
            kept_us = stepped_us + (fresh_ms * times - process.stepped_ms) * 1_000
            if process.stepped_ms < 0 and not is_large and self._now_us() <= kept_us:
                continue
            if age_ms is None or age_ms > fresh_ms * times:
                self._fail(
                    2,
                    f"{process.node_id}: {cell_id} allowed from memory, last answer about {name} cell: {age_ms} ms ago",
                )

    def _count_over_admission(self, cell_id: CellId, limit: Limit, at_ms: int) -> None:
        totals = {
            sequence: self.truth.total(cell_id._replace(sequence=sequence))
            for sequence in (cell_id.sequence - 1, cell_id.sequence)
        }
        if used_at(totals, at_ms, limit.duration_ms) > limit.quota:
            self.over_admitted.add(cell_id)

    def _region(self, region: str) -> list[NodeProcess]:
        return [process for process in self._simulation.processes.values() if process.region == region]

    def _check_over_admission(self, process: NodeProcess, limit: Limit, cell_id: CellId, at_ms: int) -> None:
        """In a region that works, every answer counts what was accepted a while ago (8)."""
        tuning = self._tuning
        trips = 3 + len(self._simulation.plan.subjects) * 2 / tuning.replay_cells_max
        age_s = (
            (2 * tuning.fresh_ms + tuning.rollover_grace_ms) / 1000 * 1.01
            + trips * self._round_trip_s()
            + 0.05
        )
        if tuning.credit:
            # A request of cost 0 is answered from memory while credit is valid, even if others have counted in the cell
            # since.
            age_s += GrantRules().life_ms / 1000 * (1 + DRIFT_PERCENT / 100)
        if any(self._calm_s(one) < age_s + self._recovery_s() for one in self._region(process.region)):
            return
        if process.evictions or self.losses[process.region] or self._has_aged_out(process, cell_id):
            return
        if any(one.engine.subjects.evicted_unreplayed for one in self._region(process.region)):
            return  # memory was full of counts that the origin did not have yet
        start_ms = cell_id.sequence * limit.duration_ms
        if not tuning.credit and 0 <= process.clock.now_ms() - start_ms < tuning.rollover_grace_ms:
            return  # a cell that begins while its subject is warm counts as empty, also if other clocks are ahead
        since_us = self._now_us() - int(age_s * 1e6)
        totals: dict[int, int] = {}
        for sequence in (cell_id.sequence - 1, cell_id.sequence):
            one = cell_id._replace(sequence=sequence)
            running = {each.node_id for each in self._region(process.region)}
            totals[sequence] = sum(
                history.at(since_us)
                for node_id, history in self.truth.accepted.get(one, {}).items()
                if node_id in running and node_id != process.node_id
            ) + self.truth.by_process(one, process.node_id)
        used = used_at(totals, at_ms, limit.duration_ms)
        if used > limit.quota:
            self._fail(8, f"{process.node_id}: {cell_id} allowed, but {used} of {limit.quota} must be known")

    def _check_exact(
        self, process: NodeProcess, limit: Limit, decision: Decision, cell_id: CellId, at_ms: int
    ) -> None:
        """With credit: a region that works accepts what a single counter would accept (11)."""
        if decision.source == "degraded":
            self.note_degraded(process.region)
        if not self.is_exact(process):
            return
        if self._has_aged_out(process, cell_id):
            return
        self.exact += 1
        totals = {
            sequence: self._delivered(cell_id._replace(sequence=sequence), process.region)
            for sequence in (cell_id.sequence - 1, cell_id.sequence)
        }
        # Judged at the time of the decision, within the cell of the request, because the request may have waited; and
        # no earlier than the latest time accepted in the cell. A request whose own time is ahead of the clock was
        # accepted for that later time, when less of the previous cell counts; requests with earlier times need not see
        # it.
        end_ms = (cell_id.sequence + 1) * limit.duration_ms - 1
        latest_ms = self.truth.latest_ms(cell_id, process.region)
        moment_ms = min(max(at_ms, process.clock.now_ms(), latest_ms), end_ms)
        used = used_at(totals, moment_ms, limit.duration_ms)
        if used > limit.quota:
            self._fail(
                11, f"{process.node_id}: {cell_id} allowed, its region has accepted {used} of {limit.quota}"
            )

    def _delivered(self, cell_id: CellId, region: str) -> int:
        """What a region has accepted, without what nodes could not report to the origin before they ended, because no
        other process knows of it."""
        place = (cell_id.digest, cell_id.sequence)
        lost = sum(
            max(0, self.truth.by_process(cell_id, one.node_id) - one.acknowledged.get(place, 0))
            for one in self._simulation.all_processes
            if one.region == region and not one.is_running
        )
        return self.truth.by_region(cell_id, region) - lost

    def _has_aged_out(self, process: NodeProcess, cell_id: CellId) -> bool:
        """The request carried its own, old time: the node or the origin no longer keeps the previous cell, or either
        cell."""
        now_ms = max(process.clock.now_ms(), self._simulation.clock.now_ms())
        return now_ms >= (cell_id.sequence + 2) * cell_id.key[2]

    def note_degraded(self, region: str) -> None:
        """A region accepted a request without an answer of its origin: other nodes learn of it later."""
        self._degraded_s[region] = self._simulation.loop.time()

    def is_exact(self, process: NodeProcess) -> bool:
        """With credit: the region of a process works, and its clocks agree."""
        now_s = self._simulation.loop.time()
        if not self._tuning.credit or now_s - self._degraded_s.get(process.region, -1e9) < self._recovery_s():
            return False
        region = self._region(process.region)
        if any(self._calm_s(one) < self._recovery_s() and not self._is_undisturbed(one) for one in region):
            return False
        if any(one.clock.now_ms() != self._simulation.clock.now_ms() or one.has_stepped for one in region):
            return False
        if any(one.engine.subjects.evicted_unreplayed for one in region):
            return False  # memory was full of counts that the origin did not have yet
        return not self.losses[process.region] and not process.evictions

    @property
    def refused(self) -> int:
        """Denied in healthy regions with credit, and not even what was accepted a round trip later explains it: credit
        that was granted to waiting requests of others is spent by then."""
        refused = 0
        for region, cell_id, at_ms, foreign, room, then_us in self._held:
            totals = {
                sequence: self.truth.by_region(cell_id._replace(sequence=sequence), region, then_us)
                + foreign.get(sequence, 0)
                for sequence in (cell_id.sequence - 1, cell_id.sequence)
            }
            refused += used_at(totals, at_ms, cell_id.key[2]) <= room
        return refused

    def check_refusals(self) -> None:
        """At the end: nodes gave back credit that they did not need when others asked for it (11).

        Credit that waiting requests of others were granted may be given back unspent, and what a batch was granted is
        not firm: so a request may be denied although it fits, now and then at the limit. If nodes keep credit that they
        do not need, it happens often.
        """
        if self.refused > REFUSED_MIN and self.refused * REFUSED_PART > self.exact:
            self._fail(
                11, f"{self.refused} requests were denied because of credit of others, {self.exact} allowed"
            )

    # -- periodic checks

    def sweep(self, process: NodeProcess) -> None:
        """Check what a process has done in the background."""
        knowledge = self.knowledge(process)
        self._check_delivery(process)
        self._check_published(process, knowledge)
        self._check_volume(process, knowledge)
        self._check_health(process)

    def _check_delivery(self, process: NodeProcess) -> None:
        """What a process accepted reaches the origin within a few round trips (8)."""
        tuning = self._tuning
        if self._calm_s(process) < self._recovery_s() or process.engine.subjects.evicted_unreplayed:
            return
        trips = 3 + len(self._simulation.plan.subjects) * 2 / tuning.replay_cells_max
        deadline_s = self._simulation.loop.time() - trips * self._round_trip_s() - 0.02
        due: dict[CellKey, int] = {}
        for at_s, digest, sequence, cost in process.accepted:
            if at_s < deadline_s:
                due[digest, sequence] = due.get((digest, sequence), 0) + cost
        for (digest, sequence), count in due.items():
            cell_id = self._simulation.auditor.cell_of(digest, sequence)
            expires_at_ms = (sequence + 3) * cell_id.key[2]
            latest_ms = max(self._simulation.clock.now_ms(), self.knowledge(process).clock_max_ms)
            if latest_ms >= expires_at_ms:
                continue
            held = sum(
                history.last
                for writer, history in self.truth.held(process.region, (digest, sequence)).items()
                if writer.partition("~")[0] == process.node_id
            )
            if process.evictions:
                # What was counted before an eviction is in the total only.
                held = max(held, self._simulation.convergence.held(process.region, digest, sequence))
            if held >= count:
                continue
            cell = (digest, sequence)
            lost_us = self._silent_losses.get((process.region, cell))
            if lost_us is not None:
                noticed_us = self.knowledge(process).noticed_us.get(cell, 0)
                if noticed_us <= lost_us or noticed_us >= deadline_s * 1e6:
                    continue
            if self._simulation.convergence.is_incomplete(process.region, digest, sequence):
                self.excused["an origin lost counts of a node that had ended"] += 1
            else:
                self._fail(8, f"{process.node_id} accepted {count} of {cell_id}, its origin holds {held}")

    def _check_published(self, process: NodeProcess, knowledge: Knowledge) -> None:
        """A count above its threshold reaches the ledger within a tick (8)."""
        tuning = self._tuning
        tick_s = tuning.publish_interval_ms / 1000 * (1 + tuning.jitter_percent / 100)
        chunks = 1 + len(self._simulation.plan.subjects) * 2 / tuning.publish_rows_max
        due_s = tick_s + (1 + chunks) * self._round_trip_s() + self._simulation.ledger.lag_ms / 1000 + 0.1
        if tuning.credit:
            # The time to wait for another node that was responsible, and two more round trips to the origin.
            due_s += GrantRules().publish_ms / 1000 + 2 * self._round_trip_s()
        now_us = self._now_us()
        calm = self._shared_calm_s(process) >= due_s + self._ledger_recovery_s()
        waiting: list[tuple[int, CellId, int, Subject]] = []
        for at_us, cell_id, regional, subject in knowledge.publishable:
            if subject.table < 0:
                continue
            if now_us - at_us < due_s * 1e6:
                waiting.append((at_us, cell_id, regional, subject))
            elif calm and knowledge.clock_max_ms < (cell_id.sequence + 2) * cell_id.key[2]:
                published = self.truth.row(cell_id, process.region).last
                due = regional
                if tuning.credit:
                    # A region publishes what its origin has.
                    held = self.truth.held(process.region, (cell_id.digest, cell_id.sequence))
                    due = min(regional, sum(history.last for history in held.values()))
                if published < due:
                    self._fail(8, f"{process.node_id} had {due} of {cell_id}, the ledger {published}")
        knowledge.publishable = waiting
        if "ledger_rejects" in self._simulation.fault_kinds:
            return
        subjects = process.engine.subjects
        regions = process.engine.global_view.regions
        for known in subjects.slots:
            if known is None or subjects.key_of(known)[0] == PROBES_WORKSPACE:
                continue
            for cell in known.cells():
                ledger = cell.ledger
                if ledger is not None and ledger.quota_min:
                    regional = cell.own + cell.others
                    if regional >= publish_threshold(ledger.quota_min, regions):
                        cell_id = CellId(subjects.key_of(known), known.identifier, cell.sequence)
                        knowledge.publishable.append((now_us, cell_id, regional, known))

    def _check_volume(self, process: NodeProcess, knowledge: Knowledge) -> None:
        """A component is sent again only when the origin lost it, or now and then to refresh the previous cell (8).

        With credit, a message carries both cells, and is sent for waiting requests, recalls and reports.
        """
        cells = len(knowledge.acknowledged)
        lived_s = self._simulation.loop.time() - process.started_s
        refreshes = lived_s * 2_000 / self._tuning.fresh_ms * len(self._simulation.plan.subjects)
        steps = 2 if process.has_stepped else 1
        # A subject that comes back after an eviction counts from 0, under another name.
        refreshes += 2 * process.evictions
        budget = 20 + steps * cells * (2 + 2 * self.losses[process.region]) + refreshes
        if self._tuning.credit:
            budget += MESSAGES_PER_ANSWER_MAX * self._answers[process.region]
            if knowledge.sent > budget:
                self._fail(8, f"{process.node_id} sent {knowledge.sent} components, {cells} cells")
        elif knowledge.repeats > budget:
            self._fail(8, f"{process.node_id} sent {knowledge.repeats} components again, {cells} cells")

    def _check_health(self, process: NodeProcess) -> None:
        """The health of a node shows failing replays, and a node that works reports no problem (8)."""
        simulation = self._simulation
        lines = {line.name: line for line in process.limiter.health()}
        origin = simulation.origins[process.region]
        tuning = self._tuning
        noticed_s = (
            (tuning.replay_timeout_ms + tuning.backoff_last_ms) / 1000 + 2 * self._round_trip_s() + 0.1
        )
        refuses_s = simulation.loop.time() - origin.refuses_since_s
        oldest_s = min(
            (at_s for at_s, digest, sequence, _ in process.accepted if at_s >= origin.refuses_since_s),
            default=simulation.loop.time(),
        )
        if (
            origin.refuses_writes
            and refuses_s > noticed_s
            and simulation.loop.time() - oldest_s > noticed_s
            and not process.is_paused
            and simulation.loop.time() - process.started_s > noticed_s
            and process.engine.pending.dirty
            and lines["counts"].ok
        ):
            self._fail(
                8, f"{process.node_id}: replays fail for {refuses_s:.3f} s, and health says {lines['counts']}"
            )
        if self._calm_s(process) > self._recovery_s() and not (lines["origin"].ok and lines["counts"].ok):
            self._fail(8, f"{process.node_id}: everything works, and health says {list(lines.values())}")

    def _fail(self, invariant: int, text: str) -> None:
        self._simulation.auditor.fail(invariant, text)
