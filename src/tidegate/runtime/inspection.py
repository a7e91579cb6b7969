"""What a node holds in memory about an identifier, as frozen values, to explain why it was denied.

Reads only: nothing here creates a subject, moves one in its queue or counts. Every call does a bounded amount of work,
because it runs on the event loop that decides: a client that chooses its own durations can make as many tables as
subjects, so look-ups stop at a bound and say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from tidegate.core.cells import Cell, Subject
from tidegate.core.engine import Engine
from tidegate.core.sharing import OriginUsage, RegionCount
from tidegate.core.table import Table
from tidegate.core.windows import carried

__all__ = ["CellParts", "Inspection", "RegionUsage", "SubjectState"]

# Tables that one look-up reads: about a millisecond.
TABLES_MAX: Final = 20_000


class RegionUsage(NamedTuple):
    """What another region has accepted in a window, as far as known."""

    counted: int
    age_ms: int | None
    """How long ago this count was learned; since then that region has published no more, as far as known. None for what
    is known only as a sum."""


class CellParts(NamedTuple):
    """The counts of one cell by where they were accepted."""

    own: int
    others: int
    foreign: int
    regions: Mapping[str, RegionUsage]
    """`foreign` by region."""

    @property
    def total(self) -> int:
        return self.own + self.others + self.foreign

    def with_regions(self, known: Sequence[RegionCount]) -> CellParts:
        """With what is known of each region; the sum may turn out to be higher."""
        regions = {name: part for name, part in self.regions.items() if name != OTHER_REGIONS}
        for region, counted, age_ms in known:
            if region not in regions or counted > regions[region].counted:
                regions[region] = RegionUsage(counted, None if age_ms < 0 else age_ms)
        named = sum(part.counted for part in regions.values())
        if named < self.foreign:
            regions[OTHER_REGIONS] = RegionUsage(self.foreign - named, None)
        return self._replace(foreign=max(self.foreign, named), regions=regions)


class SubjectState(NamedTuple):
    """One subject at one instant."""

    namespace: str
    """As the limit named it: for the server, the id of the namespace."""
    identifier: str
    duration_ms: int
    sequence: int
    elapsed_ms: int
    """How much of the current cell has passed."""
    current: CellParts
    previous: CellParts
    carried: int
    """What still counts of the previous cell."""
    reserved: int
    """What is reserved and not settled."""
    strict_ms: int
    """For how long the origin is still read before a request is allowed; 0: not at all."""
    unreplayed: int
    """Counts of this node that the origin has not acknowledged; 0 without an origin."""
    regional_age_ms: int | None
    global_age_ms: int | None
    credit: int | None
    """What this node may still accept without asking; None if credit is not in use."""

    @property
    def effective(self) -> int:
        """What counts in the sliding window."""
        return self.current.total + self.carried + self.reserved

    def with_origin(self, known: OriginUsage) -> SubjectState:
        """With what the origin has just answered: it may know more."""
        others = max(self.current.others, known.total - self.current.own)
        return self._replace(
            current=self.current._replace(others=others).with_regions(known.regions),
            reserved=max(self.reserved, known.reserved),
            regional_age_ms=0,
        )


# What is known only as a sum: another node has imported it.
OTHER_REGIONS: Final = "other regions"
NOTHING: Final = CellParts(0, 0, 0, {})


class Inspection:
    """The memory of one engine, for reading."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(self, workspace: str, identifier: str, now_ms: int) -> tuple[list[SubjectState], bool]:
        """All subjects of this identifier in the workspace, and whether all tables were looked at."""
        tables = self._engine.subjects.tables
        found = []
        for table in islice(tables.values(), TABLES_MAX):
            if table.key[0] == workspace:
                subject = table.find(identifier)
                if subject is not None:
                    found.append(self._state(table.key, subject, now_ms, now_ms))
        return found, len(tables) <= TABLES_MAX

    def get(
        self, key: tuple[str, str, int], identifier: str, now_ms: int, wall_ms: int
    ) -> SubjectState | None:
        """The subject of a limit and an identifier, if it is in memory, at `now_ms`; ages are those at `wall_ms`."""
        subject = self._engine.subjects.find(key, identifier)
        return None if subject is None else self._state(key, subject, now_ms, wall_ms)

    def parts(
        self, key: tuple[str, str, int], identifier: str, now_ms: int
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(own, others, foreign) of the current and of the previous cell: what a denial is explained with."""
        subject = self._engine.subjects.find(key, identifier)
        if subject is None:
            return (0, 0, 0), (0, 0, 0)
        sequence = now_ms // key[2]
        return _counts(subject.cell(sequence)), _counts(subject.cell(sequence - 1))

    def identifiers(self, workspace: str, namespace: str) -> Iterator[list[str]]:
        """All identifiers in memory of one namespace, some thousand at a time. The caller may let other work happen
        between two lists; an identifier that comes or goes meanwhile may be missed or listed twice."""
        tables = [
            table
            for table in islice(self._engine.subjects.tables.values(), TABLES_MAX)
            if table.key[:2] == (workspace, namespace)
        ]
        for table in tables:
            yield from _shards(table)

    def _state(self, key: tuple[str, str, int], subject: Subject, now_ms: int, wall_ms: int) -> SubjectState:
        duration_ms = key[2]
        sequence = now_ms // duration_ms
        elapsed_ms = now_ms - sequence * duration_ms
        cell = subject.cell(sequence)
        current, previous = _parts(cell, wall_ms), _parts(subject.cell(sequence - 1), wall_ms)
        regional_age_ms = -1 if cell is None or cell.origin is None else cell.origin.age_ms(wall_ms)
        global_age_ms = -1
        if cell is not None and cell.ledger is not None:
            global_age_ms = self._engine.global_view.age_ms(wall_ms)
        return SubjectState(
            key[1],
            subject.identifier,
            duration_ms,
            sequence,
            elapsed_ms,
            current,
            previous,
            carried(previous.total, elapsed_ms, duration_ms),
            subject.reserved,
            max(0, subject.strict_until_ms - wall_ms),
            sum(_unreplayed(each) for each in subject.cells()),
            None if regional_age_ms < 0 else regional_age_ms,
            None if global_age_ms < 0 else global_age_ms,
            None if subject.credit is None else subject.credit.spare,
        )


def _counts(cell: Cell | None) -> tuple[int, int, int]:
    return (0, 0, 0) if cell is None else (cell.own, cell.others, cell.foreign)


def _parts(cell: Cell | None, wall_ms: int) -> CellParts:
    if cell is None:
        return NOTHING
    known = []
    if cell.ledger is not None and cell.ledger.components is not None and cell.ledger.learned is not None:
        learned = cell.ledger.learned
        known = [
            RegionCount(region, count, max(0, wall_ms - learned[region]))
            for region, count in cell.ledger.components.items()
        ]
    # What the origin has answered says how much other regions have counted, not which.
    return CellParts(cell.own, cell.others, cell.foreign, {}).with_regions(known)


def _unreplayed(cell: Cell) -> int:
    return 0 if cell.origin is None else max(0, cell.own - cell.origin.acked)


def _shards(table: Table) -> Iterator[list[str]]:
    if table.mask == 0:
        yield list(table.whole)
    for shard in list(table.shards):
        yield list(shard)
