"""Checks which subjects a node evicts, from its memory before and after the step.

- Counts that no store has acknowledged are evicted only when their table holds nothing else. The other checks excuse
  what such an eviction loses.
- The largest table loses a subject, so a client that fills the memory loses its own subjects.
- Denied subjects are evicted last, but first while they are more than half of their table: otherwise one client with
  many denied subjects could push out the counts of all others.

Several subjects may come and go in one step, in an order that is not known here. So an eviction fails only if no order
explains it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from tidegate.core.cells import BLOCKED, CLEAN, Subject

if TYPE_CHECKING:
    from tidegate.sim.auditor import Auditor
    from tidegate.sim.node_process import NodeProcess

__all__ = ["MemoryCheck"]


class _Kept(NamedTuple):
    """A subject as it was in memory."""

    subject: Subject
    table: int
    queue: int
    expires_at_ms: int

    @property
    def is_gone(self) -> bool:
        return self.subject.table < 0

    def stayed_in(self, queue: int) -> bool:
        return self.queue == queue == self.subject.queue and self.subject.table == self.table


class _Seen(NamedTuple):
    """What a process held, and how many subjects it had evicted."""

    unreplayed: int
    evictions: int
    kept: list[_Kept]


class MemoryCheck:
    """Judges evictions. Called before and after every step that can create a subject."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self._seen: dict[str, _Seen] = {}

    def check(self, process: NodeProcess) -> None:
        subjects = process.engine.subjects
        before = self._seen.get(process.node_id, _Seen(0, 0, []))
        kept = [
            _Kept(subject, subject.table, subject.queue, (subject.sequence + 3) * subjects.key_of(subject)[2])
            for subject in subjects.slots
            if subject is not None
        ]
        if subjects.evicted_unreplayed > before.unreplayed:
            self._judge_unreplayed(process, before.kept)
        if process.evictions > before.evictions:
            self._judge_order(process, before, kept)
        self._seen[process.node_id] = _Seen(subjects.evicted_unreplayed, process.evictions, kept)

    def _judge_unreplayed(self, process: NodeProcess, before: list[_Kept]) -> None:
        spared = {one.table: one.subject.identifier for one in before if one.stayed_in(CLEAN)}
        for one in before:
            is_lost = one.is_gone and one.subject.is_unreplayed()
            if is_lost and one.queue != CLEAN and one.table in spared:
                self._auditor.fail(
                    2,
                    f"{process.node_id} evicted {one.subject.identifier}, which held counts that the origin had not "
                    f"acknowledged, and kept {spared[one.table]}, which did not",
                )

    def _judge_order(self, process: NodeProcess, before: _Seen, after: list[_Kept]) -> None:
        latest_ms = self._auditor.truth_check.knowledge(process).clock_max_ms
        known = {id(one.subject) for one in before.kept}
        gone = [one for one in before.kept if one.is_gone]
        # A subject whose cells have aged out may have expired. It holds nothing, and is judged neither way.
        evicted = [one for one in gone if latest_ms < one.expires_at_ms]
        # Subjects that were evicted in the step in which they came: of which table is not known.
        passing = max(0, process.evictions - before.evictions - len(evicted))
        sizes = Counter(one.table for one in before.kept)
        lowest = sizes - Counter(one.table for one in gone)
        highest = sizes + Counter(one.table for one in after if id(one.subject) not in known)
        blocked = Counter(one.table for one in before.kept if one.stayed_in(BLOCKED))
        clean = Counter(one.table for one in before.kept if one.stayed_in(CLEAN))
        either = [one for one in [*before.kept, *after] if BLOCKED in {one.queue, one.subject.queue}]
        maybe_blocked = Counter({id(one.subject): one.table for one in either}.values())
        for one in evicted:
            most = highest[one.table] + passing
            name = f"{process.node_id} evicted {one.subject.identifier} of a table of at most {most}"
            largest = max((size for table, size in lowest.items() if table != one.table), default=0)
            if largest > most:
                self._auditor.fail(2, f"{name}, and another held {largest}")
            if one.queue == one.subject.queue == CLEAN and 2 * blocked[one.table] > most:
                self._auditor.fail(2, f"{name}, of which {blocked[one.table]} were denied")
            is_denied = one.queue == one.subject.queue == BLOCKED and one.subject.strict_until_ms > latest_ms
            few = maybe_blocked[one.table] + passing
            # One of those that stayed may be the subject that room was made for.
            if is_denied and clean[one.table] > 1 and 2 * few <= lowest[one.table]:
                self._auditor.fail(
                    2, f"{name}, which was denied, as at most {few} were, and kept {clean[one.table]} others"
                )
