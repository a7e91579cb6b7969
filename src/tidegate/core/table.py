"""The subjects of one (workspace, namespace, duration): by identifier, by when they were used, and how many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tidegate.core.cells import BLOCKED, CLEAN, Subject

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = ["Queue", "Table", "TablesBySize"]


@final
class Queue:
    """A doubly linked list of slots, from the oldest to the newest."""

    __slots__ = ("length", "newest", "oldest")

    def __init__(self) -> None:
        self.oldest: int = -1
        self.newest: int = -1
        self.length: int = 0


@final
class Table:
    """A dictionary that stays fast while it grows.

    A large one is split once into many small dictionaries: a dictionary that grows moves all its entries, and that
    pause must stay far below a millisecond.
    """

    __slots__ = (
        "blocked",
        "bucket_ms",
        "clean",
        "count",
        "duration_ms",
        "key",
        "mask",
        "number",
        "pinned",
        "shards",
        "whole",
    )

    # A dictionary of 4,096 entries grows in about 0.1 ms; 256 of them hold the default bound of 1,000,000.
    SPLIT_AT: Final = 4_096
    SHARDS: Final = 256
    BUCKET_MS_MIN: Final = 4_096

    def __init__(self, key: tuple[str, str, int], number: int) -> None:
        self.key: Final[tuple[str, str, int]] = key
        self.duration_ms: Final[int] = key[2]
        self.number: Final[int] = number
        # Subjects that expire within the same span are checked together. A few spans to a duration keep the number
        # of spans small, however the durations vary.
        bucket_ms = Table.BUCKET_MS_MIN
        while bucket_ms * 4 < key[2]:
            bucket_ms *= 2
        self.bucket_ms: Final[int] = bucket_ms
        self.count: int = 0
        self.clean: Final[Queue] = Queue()
        self.blocked: Final[Queue] = Queue()
        self.pinned: Final[Queue] = Queue()
        # 0 until the split, then one less than the number of shards.
        self.mask: int = 0
        # All subjects until the split; then it is empty, and they are in the shards.
        self.whole: dict[str, Subject] = {}
        self.shards: list[dict[str, Subject]] = []

    def queue(self, number: int) -> Queue:
        """The queue that a subject's `queue` names."""
        if number == CLEAN:
            return self.clean
        return self.blocked if number == BLOCKED else self.pinned

    def find(self, identifier: str) -> Subject | None:
        return self._shard(identifier).get(identifier)

    def _shard(self, identifier: str) -> dict[str, Subject]:
        mask = self.mask
        if mask == 0:
            return self.whole
        # 64 bits: a hash does not fit into the compiler's usual integers, of which one bit says what they are.
        number: i64 = hash(identifier)
        return self.shards[number & mask]

    def add(self, subject: Subject) -> None:
        if self.count == Table.SPLIT_AT and self.mask == 0:
            self._split()
        self._shard(subject.identifier)[subject.identifier] = subject
        self.count += 1

    def remove(self, identifier: str) -> None:
        del self._shard(identifier)[identifier]
        self.count -= 1

    def _split(self) -> None:
        mask = Table.SHARDS - 1
        shards: list[dict[str, Subject]] = [{} for _ in range(Table.SHARDS)]
        for identifier, subject in self.whole.items():
            shards[hash(identifier) & mask][identifier] = subject
        self.shards = shards
        self.mask = mask
        self.whole = {}


@final
class TablesBySize:
    """Which table holds the most subjects, in constant time: sizes change by one."""

    __slots__ = ("_largest", "_sizes")

    def __init__(self) -> None:
        # Tables by size, then by number; of tables of one size the first is the one that has had it longest.
        self._sizes: dict[int, dict[int, Table]] = {}
        self._largest: int = 0

    def grown(self, table: Table) -> None:
        """The table has one subject more than before."""
        if table.count > 1:
            self._remove(table, table.count - 1)
        self._add(table)
        if table.count > self._largest:
            self._largest = table.count

    def shrunk(self, table: Table) -> None:
        """The table has one subject less than before."""
        self._remove(table, table.count + 1)
        if table.count > 0:
            self._add(table)
        if self._largest not in self._sizes:
            self._largest -= 1

    def largest(self) -> list[Table]:
        """Up to two of the tables that hold the most."""
        found: list[Table] = []
        for table in self._sizes.get(self._largest, {}).values():
            found.append(table)
            if len(found) == 2:
                break
        return found

    def _add(self, table: Table) -> None:
        tables = self._sizes.get(table.count)
        if tables is None:
            tables = {}
            self._sizes[table.count] = tables
        tables[table.number] = table

    def _remove(self, table: Table, size: int) -> None:
        tables = self._sizes[size]
        del tables[table.number]
        if not tables:
            del self._sizes[size]
