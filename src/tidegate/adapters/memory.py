"""An origin and a ledger in the memory of this process: the embedded default, and the stores of the simulator.

Each has a synchronous core (`*_nowait`) that does the work at once; the port's coroutines only call it. Time comes
from an injected clock. Any thread may call; a call is atomic. `snapshot`, `restore` and `wipe` simulate
failures of a real store: failing over to an older copy, coming back empty.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from tidegate.adapters.clock import WallClock
from tidegate.adapters.resets import RESETS_PER_ANSWER
from tidegate.core.generations import RESET_NAME, cell_name, cell_of
from tidegate.core.grants import (
    CellRecord,
    CreditReply,
    CreditRequest,
    GrantRules,
    SubjectRecord,
    drop_expired,
    grant,
    share,
)
from tidegate.core.model import Component, LedgerRow, OriginReply
from tidegate.core.reservations import ENDED, Claim, ClaimReply, claim, usage_of
from tidegate.core.resets import Reset, ResetsReply
from tidegate.core.sharing import ImportState, Lease, OriginUsage, Share, ShareReply, take_lease
from tidegate.errors import RegionMismatch, RowsRejected
from tidegate.ports import Changes, Clock, LedgerOverview, Pulse, RegionBeat

__all__ = ["MemoryLedger", "MemoryOrigin", "OriginSnapshot"]

CellKey = tuple[bytes, int]
RowKey = tuple[str, str, str, int, int, str]

CREDIT_RULES: Final = GrantRules()

# The most that one answer of `changes` carries, as the port says.
ANSWER_ROWS_MAX: Final = 50_000


@dataclass(frozen=True)
class CellCopy:
    """One cell of a snapshot."""

    expires_at_ms: int
    total: int
    base: int
    components: Mapping[str, int]


@dataclass(frozen=True)
class OriginSnapshot:
    """An older copy of a `MemoryOrigin`, to restore. Opaque."""

    records: Mapping[bytes, SubjectRecord]
    expiries: Sequence[tuple[int, CellKey]]
    region: str | None
    incarnation: int
    lease: Lease | None = None
    resets: Mapping[tuple[str, str, str, int], tuple[int, Reset]] = field(default_factory=dict)
    resets_number: int = 0
    resets_began: int = 0

    @cached_property
    def cells(self) -> Mapping[CellKey, CellCopy]:
        return {
            (digest, sequence): CellCopy(expires_at_ms, cell.total, cell.base, dict(cell.components))
            for expires_at_ms, (digest, sequence) in self.expiries
            for cell in [self.records[digest].cells[sequence]]
        }


class _OriginStore:
    """What the nodes of a region share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.records: dict[bytes, SubjectRecord] = {}
        self.expiries: list[tuple[int, CellKey]] = []  # a heap of all cells, each once
        self.holds_due: list[tuple[int, bytes]] = []  # a heap of all records with holds, each once
        self.holds_queued: set[bytes] = set()  # the same
        self.listeners: dict[str, Callable[[bytes, str], None]] = {}  # by node id
        self.lease: Lease | None = None
        # When the end of a reservation is forgotten, by (digest, holder), in order of insertion.
        self.ended: dict[tuple[bytes, str], int] = {}
        # Resets with the number under which each was kept, in the order of the numbers; and the last number.
        self.resets: dict[tuple[str, str, str, int], tuple[int, Reset]] = {}
        self.resets_number = 0
        # The first number since resets were last lost.
        self.resets_began = 0
        self.region: str | None = None
        self.incarnation = 0  # the value of `claims` when the present name was claimed
        self.claims = 0

    def record(self, digest: bytes) -> SubjectRecord:
        record = self.records.get(digest)
        if record is None:
            record = self.records[digest] = SubjectRecord()
        return record

    def find(self, key: CellKey) -> CellRecord | None:
        record = self.records.get(key[0])
        return None if record is None else record.cells.get(key[1])

    def cell(self, key: CellKey, expires_at_ms: int) -> CellRecord:
        record = self.record(key[0])
        if key[1] not in record.cells:
            heapq.heappush(self.expiries, (expires_at_ms, key))
        return record.cell(key[1])

    def grant(self, request: CreditRequest, now_ms: int, rules: GrantRules) -> tuple[CreditReply, list[str]]:
        digest = request.digest
        record = self.record(digest)
        if digest not in self.holds_queued:
            self._queue_holds(digest, now_ms + request.life_ms + rules.margin_ms)
        held = set(record.cells)
        answer = grant(record, request, now_ms, rules)
        for name in record.cells.keys() - held:
            sequence, _ = cell_of(name, request.duration_ms)
            heapq.heappush(self.expiries, ((sequence + 3) * request.duration_ms, (digest, name)))
        return answer

    def share(self, entry: Share, now_ms: int, rules: GrantRules) -> tuple[ShareReply, list[str]]:
        if entry.counted > 0:
            name = cell_name(entry.sequence, entry.generation, entry.duration_ms)
            self.cell((entry.digest, name), (entry.sequence + 3) * entry.duration_ms)
        return share(self.records.get(entry.digest, SubjectRecord()), entry, now_ms, rules)

    def claim(self, entry: Claim, now_ms: int) -> ClaimReply:
        place = (entry.digest, entry.holder)
        until_ms = self.ended.get(place)
        record = self.records.get(entry.digest, SubjectRecord())
        if entry.is_final and entry.amount > 0 and entry.holder in record.holds:
            name = cell_name(entry.sequence, entry.generation, entry.duration_ms)
            self.cell((entry.digest, name), (entry.sequence + 3) * entry.duration_ms)
        reply = claim(record, entry, until_ms is not None and until_ms > now_ms, now_ms)
        if reply.state == ENDED:
            self.ended.pop(place, None)
            self.ended[place] = now_ms + entry.life_ms
        return reply

    def expire(self, now_ms: int) -> None:
        for place in [*self.ended][:2]:
            if self.ended[place] <= now_ms:
                del self.ended[place]
        while self.expiries and self.expiries[0][0] <= now_ms:
            digest, sequence = heapq.heappop(self.expiries)[1]
            record = self.records[digest]
            del record.cells[sequence]
            self._drop_empty(digest, record)
        while self.holds_due and self.holds_due[0][0] <= now_ms:
            digest = heapq.heappop(self.holds_due)[1]
            self.holds_queued.discard(digest)
            held = self.records.get(digest)
            if held is None:
                continue  # the last hold was ended by a claim, and the cells have expired since
            drop_expired(held, now_ms)
            if held.holds:
                self._queue_holds(digest, max(hold.expires_at_ms for hold in held.holds.values()))
            self._drop_empty(digest, held)

    def keep_resets(self, known: Sequence[Reset], since: int, now_ms: int) -> ResetsReply:
        for place in [place for place, (_, held) in self.resets.items() if held.expires_at_ms <= now_ms]:
            del self.resets[place]
        for reset in known:
            held = self.resets.get(reset[:4])
            if reset.expires_at_ms > now_ms and (held is None or reset.generation > held[1].generation):
                self.resets_number = max(self.resets_number + 1, now_ms)
                self.resets_began = self.resets_began or self.resets_number
                self.resets.pop(reset[:4], None)
                self.resets[reset[:4]] = (self.resets_number, reset)
        if 0 < since < self.resets_began or since > self.resets_number:
            return ResetsReply(0, [])
        found = [(number, reset) for number, reset in self.resets.values() if number > since]
        if len(found) > RESETS_PER_ANSWER:
            found = found[:RESETS_PER_ANSWER]
            return ResetsReply(found[-1][0], [reset for _, reset in found], True)
        return ResetsReply(self.resets_number, [reset for _, reset in found])

    def _queue_holds(self, digest: bytes, due_ms: int) -> None:
        self.holds_queued.add(digest)
        heapq.heappush(self.holds_due, (due_ms, digest))

    def _drop_empty(self, digest: bytes, record: SubjectRecord) -> None:
        if not record.cells and not record.holds:
            del self.records[digest]


def _post(
    loop: asyncio.AbstractEventLoop, on_recall: Callable[[bytes, str], None], digest: bytes, writer: str
) -> None:
    with suppress(RuntimeError):  # that node's loop is closed
        loop.call_soon_threadsafe(on_recall, digest, writer)


class MemoryOrigin:
    """Implements `tidegate.ports.Origin` for any number of nodes in one process.

    Each node has its own object: `another()` makes one for the next node, as another connection to a server would.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock if clock is not None else WallClock()
        self._store = _OriginStore()
        self._incarnation: int | None = None  # as a pulse last read it
        self._commands = 0
        self._cells_read = 0
        self._cells_merged = 0
        self._messages = 0
        self._shares = 0
        self.can_be_recalled: bool = False

    def another(self) -> MemoryOrigin:
        """The same counts, as another node sees them."""
        other = MemoryOrigin(clock=self._clock)
        other._store = self._store
        return other

    # ---- the synchronous core

    def read_nowait(self, wanted: Sequence[Component]) -> list[OriginReply]:
        """See `Origin.read`."""
        store = self._store
        with store.lock:
            self._commands += 1
            self._cells_read += len(wanted)
            store.expire(self._clock.now_ms())
            answers = []
            for one in wanted:
                cell = store.find((one.digest, one.sequence))
                answers.append(
                    OriginReply(0, 0)
                    if cell is None
                    else OriginReply(cell.total, cell.components.get(one.writer, 0))
                )
            return answers

    def merge_nowait(self, components: Sequence[Component]) -> list[OriginReply]:
        """See `Origin.merge`."""
        store = self._store
        with store.lock:
            self._commands += 1
            self._cells_merged += len(components)
            now_ms = self._clock.now_ms()
            store.expire(now_ms)
            merged: list[CellRecord] = []
            before: dict[tuple[bytes, int, str], int] = {}
            for one in components:
                cell = store.cell((one.digest, one.sequence), one.expires_at_ms)
                held = cell.components.get(one.writer, 0)
                before.setdefault((one.digest, one.sequence, one.writer), held)
                if one.own > held:
                    cell.components[one.writer] = one.own
                    cell.total += one.own - held
                merged.append(cell)
            answers = [
                OriginReply(cell.total, before[one.digest, one.sequence, one.writer])
                for one, cell in zip(components, merged, strict=True)
            ]
            store.expire(now_ms)  # what had expired before it was merged is answered and not kept
            return answers

    def exchange_nowait(
        self, requests: Sequence[CreditRequest]
    ) -> tuple[list[CreditReply], list[tuple[bytes, str]]]:
        """See `Origin.exchange`. Answers, and (digest, writer) of the holds that must be asked back."""
        store = self._store
        with store.lock:
            self._commands += 1
            self._messages += len(requests)
            now_ms = self._clock.now_ms()
            store.expire(now_ms)
            replies: list[CreditReply] = []
            recalls: list[tuple[bytes, str]] = []
            for request in requests:
                reply, recalled = store.grant(request, now_ms, CREDIT_RULES)
                replies.append(reply)
                recalls += [(request.digest, writer) for writer in recalled]
            store.expire(now_ms)  # what had expired before it was reported is answered and not kept
            return replies, recalls

    def share_nowait(self, shares: Sequence[Share]) -> tuple[list[ShareReply], list[tuple[bytes, str]]]:
        """See `Origin.share`. Answers, and (digest, writer) of the holds that must be asked back."""
        store = self._store
        with store.lock:
            self._commands += 1
            self._shares += len(shares)
            now_ms = self._clock.now_ms()
            store.expire(now_ms)
            replies: list[ShareReply] = []
            recalls: list[tuple[bytes, str]] = []
            for entry in shares:
                reply, recalled = store.share(entry, now_ms, CREDIT_RULES)
                replies.append(reply)
                recalls += [(entry.digest, writer) for writer in recalled]
            store.expire(now_ms)
            return replies, recalls

    def usage_nowait(self, digest: bytes, sequence: int) -> OriginUsage:
        """See `Origin.regions`."""
        store = self._store
        with store.lock:
            self._commands += 1
            now_ms = self._clock.now_ms()
            store.expire(now_ms)
            return usage_of(store.records.get(digest, SubjectRecord()), sequence, now_ms)

    def claim_nowait(self, claims: Sequence[Claim]) -> list[ClaimReply]:
        """See `Origin.claim`."""
        store = self._store
        with store.lock:
            self._commands += 1
            now_ms = self._clock.now_ms()
            store.expire(now_ms)
            replies = [store.claim(entry, now_ms) for entry in claims]
            store.expire(now_ms)
            return replies

    def lease_nowait(
        self, node_id: str, life_ms: int, state: ImportState | None, *, has_lost: bool = False
    ) -> Lease:
        """See `Origin.lease`."""
        store = self._store
        with store.lock:
            self._commands += 1
            store.lease = take_lease(store.lease, node_id, life_ms, state, has_lost, self._clock.now_ms())
            return store.lease

    def pulse_nowait(self, region: str) -> Pulse:
        """See `Origin.pulse`."""
        store = self._store
        with store.lock:
            self._commands += 1
            was_empty = store.region is None
            if store.region is None:
                store.region = region
                store.claims += 1
                store.incarnation = store.claims
            elif self._incarnation is not None:
                was_empty = self._incarnation != store.incarnation
            self._incarnation = store.incarnation
            return Pulse(store.region, was_empty, self._clock.now_ms(), store.resets_number)

    def resets_nowait(self, known: Sequence[Reset], since: int) -> ResetsReply:
        """See `Origin.resets`."""
        store = self._store
        with store.lock:
            self._commands += 1
            return store.keep_resets(known, since, self._clock.now_ms())

    # ---- failures

    def snapshot(self) -> OriginSnapshot:
        """A copy to fail over to."""
        store = self._store
        with store.lock:
            records = {digest: record.copied() for digest, record in store.records.items()}
            return OriginSnapshot(
                records,
                list(store.expiries),
                store.region,
                store.incarnation,
                store.lease,
                dict(store.resets),
                store.resets_number,
                store.resets_began,
            )

    def restore(self, snapshot: OriginSnapshot) -> None:
        """Fail over to an older copy."""
        store = self._store
        with store.lock:
            store.records = {digest: record.copied() for digest, record in snapshot.records.items()}
            store.expiries = list(snapshot.expiries)
            store.holds_due = sorted((0, digest) for digest, record in store.records.items() if record.holds)
            store.holds_queued = {digest for _, digest in store.holds_due}
            store.region = snapshot.region
            store.incarnation = snapshot.incarnation
            store.lease = snapshot.lease
            store.ended = {}
            store.resets = dict(snapshot.resets)
            store.resets_number = snapshot.resets_number
            store.resets_began = snapshot.resets_began

    def drop_lease(self) -> None:
        """Lose who imports for the region, and how far it has come."""
        with self._store.lock:
            self._store.lease = None

    def wipe(self) -> None:
        """Come back empty, without even the region's name."""
        self.restore(OriginSnapshot({}, (), None, 0))

    # ---- the port

    async def open(self, region: str, *, timeout_s: float) -> None:
        held = self.pulse_nowait(region).region
        if held != region:
            raise RegionMismatch(region, held)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        return self.read_nowait(wanted)

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        return self.merge_nowait(components)

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        replies, recalls = self.exchange_nowait(requests)
        self._ask_back(recalls)
        return replies

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        replies, recalls = self.share_nowait(shares)
        self._ask_back(recalls)
        return replies

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        return self.usage_nowait(digest, sequence)

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        return self.claim_nowait(claims)

    def _ask_back(self, recalls: Sequence[tuple[bytes, str]]) -> None:
        for digest, writer in recalls:
            listener = self._store.listeners.get(writer.partition("~")[0])
            if listener is not None:
                listener(digest, writer)

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        return self.lease_nowait(node_id, life_ms, state, has_lost=has_lost)

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        return self.resets_nowait(known, since)

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        loop = asyncio.get_running_loop()
        listeners = self._store.listeners
        listeners[node_id] = lambda digest, writer: _post(loop, on_recall, digest, writer)
        self.can_be_recalled = True
        try:
            await loop.create_future()
        finally:
            self.can_be_recalled = False
            listeners.pop(node_id, None)

    @property
    def rules(self) -> GrantRules:
        return CREDIT_RULES

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        return self.pulse_nowait(region)

    async def close(self) -> None:
        """Nothing to release: what was counted stays for the other nodes of this process."""

    def statistics(self) -> Mapping[str, int]:
        return {
            "commands": self._commands,
            "connections_opened": 0,
            "cells": len(self._store.expiries),
            "cells_read": self._cells_read,
            "cells_merged": self._cells_merged,
            "messages": self._messages,
            "shares": self._shares,
        }


@dataclass(slots=True)
class _HeldRow:
    """A row of the ledger as it was last changed."""

    row: LedgerRow
    updated_at_ms: int
    change: int
    """The number of the publish that last raised it. Rises with every change in the ledger."""


def _key(row: LedgerRow) -> RowKey:
    return row.workspace, row.namespace, row.identifier, row.duration_ms, row.sequence, row.region


class MemoryLedger:
    """Implements `tidegate.ports.Ledger` for any number of regions in one process.

    `rejects` imitates a database that rejects a row. `cleans_itself` drops expired rows on publish: for a ledger
    that no `tidegate cleanup` can reach.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        rejects: Callable[[LedgerRow], bool] | None = None,
        cleans_itself: bool = False,
    ) -> None:
        self.rejects = rejects
        """May be replaced at any time."""
        self._clock = clock if clock is not None else WallClock()
        self._cleans_itself = cleans_itself
        self._lock = threading.Lock()
        self._held: dict[RowKey, _HeldRow] = {}
        # Every change in order: its number and whose it was. Entries that a later change of the same row has
        # overtaken are skipped, and swept out when they are the majority.
        self._log: list[tuple[int, RowKey]] = []
        self._expiries: list[tuple[int, RowKey]] = []  # a heap; may name rows that are gone
        self._beats: dict[str, int] = {}
        self._change = 0
        self._wipes = 0  # a cursor from before the last one gets `lost`
        self._statements = 0
        self._rows_published = 0

    # ---- the synchronous core

    def publish_nowait(self, rows: Sequence[LedgerRow]) -> None:
        """See `Ledger.publish`."""
        with self._lock:
            self._statements += 1
            if self.rejects is not None:
                for row in rows:
                    if self.rejects(row):
                        raise RowsRejected(f"the ledger refuses the row of {_key(row)!r}")
            now_ms = self._clock.now_ms()
            for row in rows:
                key = _key(row)
                held = self._held.get(key)
                if held is None:
                    heapq.heappush(self._expiries, (row.expires_at_ms, key))
                elif row.regional <= held.row.regional:
                    continue
                self._change += 1
                self._held[key] = _HeldRow(row, now_ms, self._change)
                self._log.append((self._change, key))
            self._rows_published += len(rows)
            if len(self._log) > 2 * len(self._held) + 1_000:
                self._log = [entry for entry in self._log if self._is_latest(*entry)]
            if self._cleans_itself:
                self._delete(now_ms, len(self._expiries))

    def changes_nowait(self, cursor: str | None, *, now_ms: int) -> Changes:
        """See `Ledger.changes`. A publish is atomic here, so that none can commit late and nothing overlaps."""
        with self._lock:
            self._statements += 1
            position, wipes = (0, self._wipes) if cursor is None else map(int, cursor.split("/"))
            rows: list[LedgerRow] = []
            newest: dict[str, int] = {}
            more = False
            for held in self._changed_since(position):
                if held.row.expires_at_ms > now_ms:
                    if len(rows) == ANSWER_ROWS_MAX:
                        more = True
                        break
                    rows.append(held.row)
                    newest[held.row.region] = max(held.updated_at_ms, newest.get(held.row.region, 0))
                position = held.change
            clock_ms = self._clock.now_ms()
            lag_ms = {region: clock_ms - at for region, at in newest.items()}
            return Changes(rows, f"{position}/{self._wipes}", lag_ms, more, wipes < self._wipes)

    def heartbeat_nowait(self, region: str) -> list[RegionBeat]:
        """See `Ledger.heartbeat`."""
        with self._lock:
            self._statements += 1
            self._beats[region] = self._clock.now_ms()
            return self._all_beats()

    def cleanup_nowait(self, cutoff_ms: int, *, rows_max: int) -> int:
        """See `Ledger.cleanup`."""
        with self._lock:
            self._statements += 1
            return self._delete(cutoff_ms, rows_max)

    def overview_nowait(self, *, now_ms: int, hottest_max: int) -> LedgerOverview:
        """See `Ledger.overview`."""
        with self._lock:
            self._statements += 1
            live = [held.row for held in self._held.values() if held.row.expires_at_ms > now_ms]
            return LedgerOverview(
                regions=self._all_beats(),
                rows=dict(Counter(row.region for row in live)),
                expired_rows=len(self._held) - len(live),
                hottest=heapq.nsmallest(
                    hottest_max,
                    [row for row in live if row.sequence != RESET_NAME],
                    key=lambda row: (-row.regional, _key(row)),
                ),
                clock_ms=self._clock.now_ms(),
            )

    # ---- inspection and failures

    def rows(self) -> list[LedgerRow]:
        """Every row, expired or not, sorted by its key."""
        with self._lock:
            return [self._held[key].row for key in sorted(self._held)]

    def wipe(self) -> None:
        """Lose every row and every heartbeat. Cursors from before stay valid."""
        with self._lock:
            self._held.clear()
            self._log.clear()
            self._expiries.clear()
            self._beats.clear()
            self._wipes += 1

    # ---- the port

    async def open(self, *, timeout_s: float) -> None:
        """Nothing to connect to, and no schema to be missing."""

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        self.publish_nowait(rows)

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        return self.changes_nowait(cursor, now_ms=now_ms)

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        return self.heartbeat_nowait(region)

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        return self.cleanup_nowait(cutoff_ms, rows_max=rows_max)

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        return self.overview_nowait(now_ms=now_ms, hottest_max=hottest_max)

    async def close(self) -> None:
        """Nothing to release: what was published stays for the other regions of this process."""

    def statistics(self) -> Mapping[str, int]:
        return {
            "statements": self._statements,
            "connections_opened": 0,
            "rows": len(self._held),
            "rows_published": self._rows_published,
        }

    # ---- inside

    def _is_latest(self, change: int, key: RowKey) -> bool:
        held = self._held.get(key)
        return held is not None and held.change == change

    def _changed_since(self, position: int) -> Iterator[_HeldRow]:
        """Rows whose last change is later than `position`, in the order of their changes."""
        first = bisect_right(self._log, position, key=lambda entry: entry[0])
        for index in range(first, len(self._log)):
            change, key = self._log[index]
            if self._is_latest(change, key):
                yield self._held[key]

    def _all_beats(self) -> list[RegionBeat]:
        return [RegionBeat(region, self._beats[region]) for region in sorted(self._beats)]

    def _delete(self, cutoff_ms: int, rows_max: int) -> int:
        """Drop the rows that expired first, before `cutoff_ms`."""
        deleted = 0
        while deleted < rows_max and self._expiries and self._expiries[0][0] < cutoff_ms:
            if self._held.pop(heapq.heappop(self._expiries)[1], None) is not None:
                deleted += 1
        return deleted
