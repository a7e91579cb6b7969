"""The incremental import: which rows to ask for next, and why none can be missed.

A publish takes the row of its region in `ratelimit_publishes`, raises it to `max(previous + 1, the database's clock)`
and writes that number as `updated_at` of every row it raises. It holds the region's row until it commits. So, within
one region, publishes commit in the order of their numbers: a reader of number n sees every number below n. The place
reached in each region, (updated_at, subject, sequence), is therefore all that a cursor needs. A transaction that
stays open for an hour keeps its own region from publishing for an hour (other regions do not notice) and is read in
full when it commits; its number was never passed, because no other publish could get a higher one meanwhile.

Rejected: a watermark on the database's clock with an overlap. It is right only if no transaction is ever longer than
the overlap, which no timeout of MySQL guarantees, and it reads the same rows again at every import. Snapshots of
PostgreSQL (xmin, xip) are exact too, but MySQL has nothing like them, and transaction ids do not survive a restore.

A full read follows the rows in the order of their expiry, so that it touches live rows only, and starts the cursor at
the numbers that the regions had when it began: what changes meanwhile has a higher number.

A region whose number is below the cursor's has been restored from an older copy, or lost its last commits in a
fail-over: it is read from the start. Knows no SQL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from tidegate.adapters.ledger_rows import RowReader
from tidegate.ports import Changes

__all__ = ["ANSWER_ROWS_MAX", "ChangeReader", "Heads", "LivePlace", "Place", "read_changes"]

# The most that one answer of `changes` carries. The port allows 50,000; but the garbage collector looks at every row
# of an answer in one go, and 10,000 take it some milliseconds.
ANSWER_ROWS_MAX: Final = 10_000

# The most that one statement returns: drivers build the whole answer in few steps, 1 ms for a thousand rows.
STATEMENT_ROWS_MAX: Final = 2_000

LAST_SUBJECT: Final = b"\xff" * 16
LAST_SEQUENCE: Final = 2**63 - 1


class Place(NamedTuple):
    """How far the changes of one region have been read: up to and including this row."""

    updated_at: int
    subject: bytes
    sequence: int


class LivePlace(NamedTuple):
    """How far a full read has come."""

    expires_at: int
    subject: bytes
    sequence: int
    region: bytes


class Heads(NamedTuple):
    """The latest publish of each region, and the database's clock."""

    published_at: Mapping[bytes, int]
    clock_ms: int


class ChangeReader(Protocol):
    """What a dialect does: three queries, each one round trip.

    Records are as `RowReader` takes them.
    """

    async def heads(self) -> Heads:
        """What every region has published."""

    async def live(self, after: LivePlace, limit: int) -> Sequence[Sequence[Any]]:
        """The next records in the order of `LivePlace`."""

    async def changed(
        self, after: Mapping[bytes, Place], *, now_ms: int, limit: int
    ) -> tuple[Heads, Mapping[bytes, Sequence[Sequence[Any]]]]:
        """For each region asked for, its next records in the order of `Place`, unless expired at `now_ms`.

        The heads of all regions are read before the records, or in the same snapshot.
        """


START: Final = Place(-1, b"", -1)


def end_of(published_at: int) -> Place:
    """Behind all rows of this publish and all before it."""
    return Place(published_at, LAST_SUBJECT, LAST_SEQUENCE)


@dataclass
class Cursor:
    """Where the import stands. `after` is set in the middle of a full read."""

    places: dict[bytes, Place] = field(default_factory=dict)
    after: LivePlace | None = None

    def dumped(self) -> str:
        state: dict[str, object] = {
            "places": {
                region.hex(): [place.updated_at, place.subject.hex(), place.sequence]
                for region, place in self.places.items()
            }
        }
        if self.after is not None:
            expires_at, subject, sequence, region = self.after
            state["after"] = [expires_at, subject.hex(), sequence, region.hex()]
        return json.dumps(state, separators=(",", ":"))

    @classmethod
    def loaded(cls, text: str | None) -> Cursor | None:
        """None for None and for what is not a cursor of ours: a full read heals both."""
        if text is None:
            return None
        try:
            state = json.loads(text)
            places = {
                bytes.fromhex(region): Place(int(updated_at), bytes.fromhex(subject), int(sequence))
                for region, (updated_at, subject, sequence) in state["places"].items()
            }
            after = state.get("after")
            if after is not None:
                after = LivePlace(
                    int(after[0]), bytes.fromhex(after[1]), int(after[2]), bytes.fromhex(after[3])
                )
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            return None
        return cls(places, after)


async def read_changes(
    reader: ChangeReader,
    cursor_text: str | None,
    *,
    now_ms: int,
    rows_max: int = ANSWER_ROWS_MAX,
    statement_rows_max: int = STATEMENT_ROWS_MAX,
) -> Changes:
    """One answer of `Ledger.changes`."""
    answer = _Answer(reader, now_ms, rows_max, statement_rows_max)
    cursor = Cursor.loaded(cursor_text)
    if cursor is None or cursor.after is not None:
        cursor = await answer.read_live(cursor)
    else:
        await answer.read_changed(cursor)
    lag_ms = answer.rows.lag_ms(answer.clock_ms)
    return Changes(
        answer.rows.rows, cursor.dumped(), lag_ms, answer.more, answer.lost, answer.rows.unreadable
    )


class _Answer:
    """One answer while it is put together."""

    def __init__(self, reader: ChangeReader, now_ms: int, rows_max: int, statement_rows_max: int) -> None:
        self.rows = RowReader()
        self.clock_ms = 0
        self.more = False
        self.lost = False
        self._reader = reader
        self._now_ms = now_ms
        self._rows_max = rows_max
        self._statement_rows_max = statement_rows_max

    @property
    def room(self) -> int:
        """How many more rows fit."""
        return self._rows_max - len(self.rows.rows) - self.rows.unreadable

    async def read_live(self, cursor: Cursor | None) -> Cursor:
        """Begin a full read, or continue it."""
        heads = await self._reader.heads()
        self.clock_ms = heads.clock_ms
        if cursor is None:
            cursor = Cursor({region: end_of(at) for region, at in heads.published_at.items()})
        # Behind everything that has expired by now.
        first = LivePlace(self._now_ms, LAST_SUBJECT, LAST_SEQUENCE, b"")
        cursor.after = first if cursor.after is None else max(cursor.after, first)
        self.more = True
        while self.room > 0:
            limit = min(self._statement_rows_max, self.room)
            records = await self._reader.live(cursor.after, limit)
            await self.rows.add(records)
            if len(records) < limit:
                cursor.after = None
                self.more = False
                break
            subject, sequence, region, *_, expires_at, _ = records[-1]
            cursor.after = LivePlace(expires_at, bytes(subject), sequence, bytes(region))
        return cursor

    async def read_changed(self, cursor: Cursor) -> None:
        """Move every region's place to its end, or until the answer is full."""
        places = cursor.places
        pending = sorted(places)
        is_first = True
        while is_first or (pending and self.room > 0):
            is_first = False
            asked = pending[: self.room]
            limit = max(1, min(self._statement_rows_max, self.room) // max(1, len(asked)))
            heads, answers = await self._reader.changed(
                {region: places[region] for region in asked}, now_ms=self._now_ms, limit=limit
            )
            self.clock_ms = heads.clock_ms
            unfinished = pending[len(asked) :]
            for region, records in answers.items():
                await self.rows.add(records)
                head = heads.published_at.get(region)
                self.lost = self.lost or places[region].updated_at > (-1 if head is None else head)
                place = next_place(places[region], records, head, is_full=len(records) >= limit)
                if place is None:
                    del places[region]
                    continue
                places[region] = place
                if place == START or len(records) >= limit:
                    unfinished.append(region)
            for region in heads.published_at:
                if region not in places:
                    places[region] = START
                    unfinished.append(region)
            pending = sorted(unfinished)
        self.more = bool(pending)


def next_place(
    place: Place, records: Sequence[Sequence[Any]], head: int | None, *, is_full: bool
) -> Place | None:
    """Where a region stands after `records` were read from `place`; None when it is gone.

    Everything up to `head` was visible when the records were read.
    """
    if is_full:
        subject, sequence, *_, updated_at = records[-1]
        return Place(updated_at, bytes(subject), sequence)
    if head is None:
        return None
    if place.updated_at > head:
        return START  # an older copy of the ledger: its numbers are below ours
    return end_of(max(head, records[-1][-1] if records else 0))
