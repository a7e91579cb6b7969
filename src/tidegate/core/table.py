"""The subjects of one (workspace, namespace, duration), by identifier."""

from __future__ import annotations

from typing import Final, final

from tidegate.core.cells import Subject

__all__ = ["Table"]


@final
class Table:
    """A dictionary that stays fast while it grows.

    A large one is split once into many small dictionaries: a dictionary that grows moves all its entries, and that
    pause must stay far below a millisecond.
    """

    __slots__ = ("bucket_ms", "count", "duration_ms", "key", "mask", "number", "shards", "whole")

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
        # 0 until the split, then one less than the number of shards.
        self.mask: int = 0
        # All subjects until the split; then it is empty, and they are in the shards.
        self.whole: dict[str, Subject] = {}
        self.shards: list[dict[str, Subject]] = []

    def find(self, identifier: str) -> Subject | None:
        return self._shard(identifier).get(identifier)

    def _shard(self, identifier: str) -> dict[str, Subject]:
        return self.shards[hash(identifier) & self.mask] if self.mask else self.whole

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
