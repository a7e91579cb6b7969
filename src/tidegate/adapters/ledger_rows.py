"""How a ledger row is written to and read from a database: the same bytes in every dialect.

Names are UTF-8 with lone surrogates let through, so that any str that Python can hold comes back as it was. The key
of a row is (subject digest, sequence, region). Work on many rows is done in slices, with turns of the event loop
between them. Knows no SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from heapq import merge
from itertools import islice
from typing import Any, Final, NamedTuple

from tidegate.core.generations import RESET_NAME, cell_of
from tidegate.core.model import DURATION_MS_MAX, TIME_MS_MAX, LedgerRow, subject_digest
from tidegate.ports import RegionBeat

__all__ = [
    "ROWS_PER_PUBLISH_MAX",
    "SLICE_ROWS",
    "RowReader",
    "StoredRow",
    "beats_of",
    "encode_name",
    "shown_name",
    "stored_rows",
]

# What the port allows in one publish.
ROWS_PER_PUBLISH_MAX: Final = 5_000

# Rows handled between two turns of the event loop: about half a millisecond on a busy core.
SLICE_ROWS: Final = 100


def encode_name(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def decode_name(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")


class StoredRow(NamedTuple):
    """A row as it is sent. Its first three fields are the key: sorting rows sorts them in key order."""

    subject: bytes
    sequence: int
    region: bytes
    workspace: bytes
    namespace: bytes
    identifier: bytes
    duration_ms: int
    regional: int
    expires_at_ms: int


def stored_row(row: LedgerRow) -> StoredRow:
    return StoredRow(
        subject_digest(row.workspace, row.namespace, row.identifier, row.duration_ms),
        row.sequence,
        encode_name(row.region),
        encode_name(row.workspace),
        encode_name(row.namespace),
        encode_name(row.identifier),
        row.duration_ms,
        row.regional,
        row.expires_at_ms,
    )


async def stored_rows(rows: Sequence[LedgerRow]) -> list[StoredRow]:
    """`rows` in key order, and of several for one key the highest: a statement may touch a row only once."""
    runs: list[list[StoredRow]] = []
    for start in range(0, len(rows), SLICE_ROWS):
        runs.append(sorted(map(stored_row, rows[start : start + SLICE_ROWS])))
        await asyncio.sleep(0)
    in_order = merge(*runs)
    kept: list[StoredRow] = []
    while run := list(islice(in_order, SLICE_ROWS)):
        for row in run:
            if kept and kept[-1][:3] == row[:3]:
                # Rows of one key differ in nothing but their count, and the highest comes last.
                kept[-1] = row
            else:
                kept.append(row)
        await asyncio.sleep(0)
    return kept


def _has_possible_numbers(row: LedgerRow) -> bool:
    """Whether the numbers of a row can be those of a cell or a reset."""
    if not 1 <= row.duration_ms <= DURATION_MS_MAX:
        return False
    if row.sequence == RESET_NAME:
        return row.regional <= TIME_MS_MAX
    sequence, generation = cell_of(row.sequence, row.duration_ms)
    return sequence >= 0 and max(sequence * row.duration_ms, generation) <= TIME_MS_MAX


class RowReader:
    """Turns records of (subject, sequence, region, workspace, namespace, identifier, duration_ms, count, expires_at,
    updated_at) into rows, and remembers how new the newest of each region is.

    A record that cannot be read is skipped and counted: any program with the password can write anything, and one
    such row must not keep all others from being imported.
    """

    def __init__(self) -> None:
        self.rows: list[LedgerRow] = []
        self.unreadable: int = 0
        self.newest_ms: dict[str, int] = {}
        # Few regions, workspaces and namespaces, many rows: decoding each once saves time and memory.
        self._names: dict[bytes, str] = {}

    async def add(self, records: Sequence[Sequence[Any]]) -> None:
        """Read `records`, in slices."""
        for start in range(0, len(records), SLICE_ROWS):
            self.add_nowait(records[start : start + SLICE_ROWS])
            await asyncio.sleep(0)

    def add_nowait(self, records: Iterable[Sequence[Any]]) -> None:
        names = self._names
        newest_ms = self.newest_ms
        for (
            _,
            sequence,
            region,
            workspace,
            namespace,
            identifier,
            duration,
            count,
            expires,
            updated,
        ) in records:
            try:
                region_name = names.get(region) or names.setdefault(region, decode_name(region))
                row = LedgerRow(
                    names.get(workspace) or names.setdefault(workspace, decode_name(workspace)),
                    names.get(namespace) or names.setdefault(namespace, decode_name(namespace)),
                    decode_name(identifier),
                    duration,
                    sequence,
                    region_name,
                    count,
                    expires,
                )
            except UnicodeDecodeError:
                self.unreadable += 1
                continue
            if not _has_possible_numbers(row):
                self.unreadable += 1
                continue
            self.rows.append(row)
            if updated > newest_ms.get(region_name, -1):
                newest_ms[region_name] = updated

    def lag_ms(self, clock_ms: int) -> dict[str, int]:
        """How old the newest change of each region is. A change made after the clock was read is not negative."""
        return {region: max(0, clock_ms - at_ms) for region, at_ms in self.newest_ms.items()}


def beats_of(records: Iterable[Sequence[Any]]) -> list[RegionBeat]:
    """From records of (region, beat_at), by name. A name that cannot be read was not written by us."""
    beats = []
    for region, beat_at in records:
        with suppress(UnicodeDecodeError):
            beats.append(RegionBeat(decode_name(bytes(region)), beat_at))
    return sorted(beats)


def shown_name(name: bytes) -> str:
    """As text, also if it cannot be decoded."""
    try:
        return decode_name(name)
    except UnicodeDecodeError:
        return name.decode("utf-8", "backslashreplace")
