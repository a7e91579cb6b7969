"""Which subjects a node evicts: counts that no store has acknowledged go only when their table holds nothing else.

The other checks excuse what such an eviction loses. So each one is judged here, from the memory of the node before the
step that made room and after it: no subject may be left in the same table that could have gone instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.core.cells import CLEAN, Subject

if TYPE_CHECKING:
    from tidegate.sim.auditor import Auditor
    from tidegate.sim.node_process import NodeProcess

__all__ = ["MemoryCheck"]


class _Kept(NamedTuple):
    """A subject as it was in memory."""

    subject: Subject
    table: int
    is_clean: bool


class MemoryCheck:
    """Judges evictions. Called before and after every step that can create a subject."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        # By process: how many unreplayed subjects it had evicted, and what it held.
        self._seen: dict[str, tuple[int, list[_Kept]]] = {}

    def look(self, process: NodeProcess) -> None:
        subjects = process.engine.subjects
        evicted, before = self._seen.get(process.node_id, (0, []))
        if subjects.evicted_unreplayed > evicted:
            self._judge(process, before)
        after = [
            _Kept(subject, subject.table, subject.queue == CLEAN)
            for subject in subjects.slots
            if subject is not None
        ]
        self._seen[process.node_id] = (subjects.evicted_unreplayed, after)

    def _judge(self, process: NodeProcess, before: list[_Kept]) -> None:
        spared = {
            one.table: one.subject.identifier
            for one in before
            if one.is_clean and one.subject.table == one.table and one.subject.queue == CLEAN
        }
        for one in before:
            is_gone = one.subject.table < 0 and one.subject.is_unreplayed()
            if is_gone and not one.is_clean and one.table in spared:
                self._auditor.fail(
                    2,
                    f"{process.node_id} evicted {one.subject.identifier}, which held counts that the origin had not "
                    f"acknowledged, and kept {spared[one.table]}, which did not",
                )
