"""The import loop: what other regions published, and what this region published, into the local view.

One node imports for its region, four times a second, and writes what it reads to Redis (`import_lease`). While Redis
does not answer, or without Redis, every node imports for itself: every five seconds, and faster while it holds cells
above their threshold.

The import is incremental, by the cursor of the database (the ledger), with a full read at the start and from time to
time. Rows are merged in slices, so that no turn blocks the event loop for long. Each turn also writes the heartbeat of
the region; the reply contains the number of regions that are alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import Final, NamedTuple

from tidegate.core.gate import Gate
from tidegate.core.generations import RESET_NAME, cell_of
from tidegate.core.ledger_sync import LedgerSync
from tidegate.core.model import LedgerRow, Tuning, subject_digest
from tidegate.core.sharing import NOT_DUE, Share
from tidegate.errors import DependencyError
from tidegate.ports import Changes, Ledger, RegionBeat
from tidegate.runtime.calls import Calls
from tidegate.runtime.import_lease import ImportLease
from tidegate.runtime.loops import Metronome, wait_for_event

__all__ = ["ImportLoop", "Imported"]

logger: Final = logging.getLogger(__name__)

# Rows merged between two turns of the event loop: about half a millisecond, compiled.
SLICE_ROWS: Final = 200

# A ledger that lost rows is read in full at once, but not again within so many import intervals: replicas that
# answer in turn, one behind the other, look like a loss every time.
LOSS_INTERVALS: Final = 6


# When counts of other regions that were evicted are needed again, a full read comes this many import intervals after
# the last one at the earliest: an attacker who fills memory must not cost the database a full read at every tick.
EVICTED_INTERVALS: Final = 2


class _For(Enum):
    """For whom a node imports."""

    SELF = "self"
    REGION = "region"
    NONE = "none"


def _ignore(*_given: object) -> None:
    """Does nothing."""


class Imported(NamedTuple):
    """What one turn did."""

    ok: bool
    rows: int
    full: bool


class ImportLoop:
    """Imports the ledger into one node."""

    def __init__(
        self,
        ledger: Ledger,
        region: str,
        gate: Gate,
        sync: LedgerSync,
        tuning: Tuning,
        random: Random,
        import_lease: ImportLease | None = None,
        *,
        on_due: Callable[[Sequence[tuple[LedgerRow, int]]], object] = _ignore,
        on_resets: Callable[[], object] = _ignore,
        on_full: Callable[[dict[tuple[str, str, str, int], int]], object] = _ignore,
        has_unsent_resets: Callable[[], bool] = lambda: False,
    ) -> None:
        self._import_lease = import_lease
        # For whom the last turn imported, and in which term of the lease.
        self._for: _For = _For.SELF
        self._term = 0
        # Called with rows of this region that the origin has made this node responsible for.
        self._on_due = on_due
        # Called when rows have brought resets, and with all that a full read has found: generations by counter.
        self._on_resets = on_resets
        self._on_full = on_full
        # Whether the origin has not confirmed all resets that were found.
        self._has_unsent_resets = has_unsent_resets
        self._resets_found: dict[tuple[str, str, str, int], int] = {}
        # The ledger holds less than it did, and a full read has not begun yet.
        self._is_lost = False
        self._regions_live = 1
        self._ledger = ledger
        self._region = region
        self._gate = gate
        self._sync = sync
        self._tuning = tuning
        self._random = random
        self._timeout_s = tuning.ledger_timeout_ms / 1000
        self._cursor: str | None = None
        # When a full read is due, and when one is due after a loss.
        self._full_at_s = 0.0
        self._heal_at_s = 0.0
        self._evicted_at_s = 0.0
        self._wanted = asyncio.Event()
        self.calls: Final[Calls] = Calls("ledger_import", tuning)
        # Logged once when it begins, and once when it ends.
        self._is_down = False
        # Logged once, until a full read finds none.
        self._has_unreadable = False
        self.rows_unreadable: int = 0
        self.rows_last: int = 0
        self.rows_total: int = 0
        self.lag_ms: dict[str, int] = {}
        # Of all regions together, as `_note_lag` measures it, smoothed; -1 before the first.
        self._lag_ms = -1
        self.beats: list[RegionBeat] = []
        # When `beats` was read, by the clock of the event loop.
        self._beats_at_s = 0.0

    def import_soon(self) -> None:
        """Cells are hot: do not wait for the slow tick."""
        self._wanted.set()

    @property
    def _is_full_due(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        is_wanted = self._for is _For.SELF and self._sync.wants_full_import and now_s >= self._evicted_at_s
        return self._cursor is None or now_s >= self._full_at_s or is_wanted

    async def run_once(self, *, full: bool | None = None) -> Imported:
        """One turn; `full` is None for a full read when it is due. A failure leaves everything as it was: existing
        foreign counts stay."""
        loop = asyncio.get_running_loop()
        full = self._is_full_due if full is None else full
        rows = 0
        unreadable = 0
        lost = False
        now_ms = self._gate.now_ms()
        cursor = None if full else self._cursor
        is_shared = self._for is _For.REGION
        if full and not is_shared:
            self._sync.begin_full_import()
        try:
            more = True
            while more:
                asked_s = loop.time()
                changes = await self._changes(cursor, now_ms)
                round_trip_s = loop.time() - asked_s
                for start in range(0, len(changes.rows), SLICE_ROWS):
                    if is_shared:
                        await self._share(changes, start, now_ms)
                    else:
                        await self._merge(changes, start, now_ms, full)
                rows += len(changes.rows)
                if not full:
                    # What a full read brings may be old because nothing has happened since: that is not a lag.
                    self.lag_ms.update(changes.lag_ms)
                    self._note_lag(changes, round_trip_s)
                cursor = changes.cursor
                more = changes.more
                lost = lost or changes.lost
                unreadable += changes.unreadable
        except DependencyError as error:
            if full and not is_shared:
                self._sync.fail_full_import()
            if self.calls.is_failing and not self._is_down:
                self._is_down = True
                logger.warning("the ledger does not answer, regions drift apart: %s", error)
            return Imported(False, rows, full)
        self._note_answer()
        if not (full and is_shared and self._cursor is not None):
            self._cursor = cursor
        # Otherwise continue from before the full read: rows that were lost just before it can be detected only after
        # that cursor.
        self._note_unreadable(unreadable, full)
        if full:
            self._full_at_s = loop.time() + self._tuning.import_full_interval_ms / 1000
            interval_s = self._tuning.import_interval_ms / 1000
            self._heal_at_s = loop.time() + LOSS_INTERVALS * interval_s
            self._evicted_at_s = loop.time() + EVICTED_INTERVALS * interval_s
        elif lost:
            # A full read shows which of this region's rows are missing, so that a wiped ledger is filled again.
            self._full_at_s = min(self._full_at_s, self._heal_at_s)
            self._is_lost = True
        if not is_shared:
            with self._gate:
                self._sync.finish_import(self._gate.now_ms(), full=full)
        self.rows_last = rows
        self.rows_total += rows
        self._note_resets(full)
        return Imported(True, rows, full)

    def _note_lag(self, changes: Changes, round_trip_s: float) -> None:
        """How old counts of other regions are when they are here: since their rows were written, and the way to the
        ledger and back, because the one of a row to the ledger takes about as long as its way from there."""
        ages_ms = [lag_ms for region, lag_ms in changes.lag_ms.items() if region != self._region]
        if not ages_ms:
            return
        found_ms = min(
            sum(ages_ms) // len(ages_ms) + int(round_trip_s * 1000), 2 * self._tuning.import_hot_interval_ms
        )
        self._lag_ms = found_ms if self._lag_ms < 0 else (3 * self._lag_ms + found_ms) // 4

    def _note_answer(self) -> None:
        if self._is_down:
            self._is_down = False
            logger.info("the ledger answers again")

    def _note_unreadable(self, unreadable: int, full: bool) -> None:
        self.rows_unreadable += unreadable
        if unreadable and not self._has_unreadable:
            logger.warning(
                "%d rows of the ledger cannot be read and are skipped: another program writes to its tables",
                unreadable,
            )
        if unreadable or full:
            self._has_unreadable = unreadable > 0

    async def _changes(self, cursor: str | None, now_ms: int) -> Changes:
        changes = await self.calls.call(
            ["import"],
            lambda timeout_s: self._ledger.changes(cursor, now_ms=now_ms, timeout_s=timeout_s),
            self._timeout_s,
        )
        if self._import_lease is not None:
            self._import_lease.note_progress()
        if cursor is None:
            self._resets_found = {}
        for row in changes.rows:
            if row.sequence == RESET_NAME:
                self._resets_found[row[:4]] = max(row.regional, self._resets_found.get(row[:4], 0))
        return changes

    async def _merge(self, changes: Changes, start: int, now_ms: int, full: bool) -> None:
        rows = changes.rows[start : start + SLICE_ROWS]
        with self._gate:
            self._sync.apply_import(rows, now_ms, full=full, lag_ms=dict(changes.lag_ms))
        await asyncio.sleep(0)

    def _note_resets(self, full: bool) -> None:
        if self._sync.has_imported_resets:
            self._on_resets()
        if full:
            self._on_full(self._resets_found)
        self._resets_found = {}

    async def beat_once(self) -> bool:
        """Write the heartbeat of this region, and read how many regions are alive."""
        try:
            self.beats = await self.calls.call(
                ["heartbeat"],
                lambda timeout_s: self._ledger.heartbeat(self._region, timeout_s=timeout_s),
                self._timeout_s,
            )
        except DependencyError:
            return False
        self._note_answer()
        self._beats_at_s = asyncio.get_running_loop().time()
        newest_ms = max(beat.beat_at_ms for beat in self.beats)
        live = sum(newest_ms - beat.beat_at_ms <= self._tuning.region_live_ms for beat in self.beats)
        self._regions_live = live
        with self._gate:
            self._sync.apply_regions(live)
        return True

    def heartbeat_age_ms(self, now_s: float) -> dict[str, int]:
        """The age of each region's heartbeat. The newest one, usually our own, gives the ledger's clock."""
        if not self.beats:
            return {}
        newest_ms = max(beat.beat_at_ms for beat in self.beats)
        since_ms = max(0, int((now_s - self._beats_at_s) * 1000))
        return {beat.region: newest_ms - beat.beat_at_ms + since_ms for beat in self.beats}

    def _interval_s(self) -> float:
        hot = self._gate.now_ms() < self._sync.hot_until_ms
        interval_ms = self._tuning.import_hot_interval_ms if hot else self._tuning.import_interval_ms
        self._sync.apply_import_interval(interval_ms)
        return interval_ms / 1000

    # -- for whom

    def _turn_for(self) -> _For:
        if self._import_lease is None or not self._import_lease.is_shared:
            return _For.SELF
        return _For.REGION if self._import_lease.is_holder else _For.NONE

    def _is_new_term(self, turn: _For) -> bool:
        return (
            turn is _For.REGION and self._import_lease is not None and self._import_lease.terms != self._term
        )

    def _begin(self, turn: _For) -> None:
        """This node starts or stops importing for others: a cursor describes what its reader has, and is wrong for
        another."""
        self._for = turn
        self._cursor = None
        if turn is not _For.REGION:
            return
        assert self._import_lease is not None
        self._term = self._import_lease.terms
        state = self._import_lease.state
        if state.cursor:
            # Another node has imported up to here, and the origin has it.
            self._cursor = state.cursor
            since_s = max(0.0, (self._import_lease.origin_ms() - state.full_at_ms) / 1000)
            interval_s = self._tuning.import_interval_ms / 1000
            now_s = asyncio.get_running_loop().time()
            self._full_at_s = now_s + self._tuning.import_full_interval_ms / 1000 - since_s
            self._heal_at_s = now_s + LOSS_INTERVALS * interval_s - since_s

    def _note_loss(self) -> None:
        """The origin lost counts since the last full read, and so perhaps what other regions have published."""
        assert self._import_lease is not None
        lease = self._import_lease.lease
        if lease is not None and lease.lost_at_ms > self._import_lease.state.full_at_ms:
            self._full_at_s = min(self._full_at_s, self._heal_at_s)

    async def _share(self, changes: Changes, start: int, now_ms: int) -> None:
        """Write rows to the origin. It may find that this node has to publish some of its region's."""
        import_lease = self._import_lease
        assert import_lease is not None
        with self._gate:
            given = changes.rows[start : start + SLICE_ROWS]
            rows = [row for row in given if self._sync.is_counted(row, now_ms)]
            entries = [
                Share(
                    subject_digest(row.workspace, row.namespace, row.identifier, row.duration_ms),
                    row.duration_ms,
                    cell_of(row.sequence, row.duration_ms)[0],
                    "" if row.region == self._region else row.region,
                    row.regional,
                    import_lease.node_id,
                    import_lease.state.epoch,
                    self._sync.generation_of(row),
                )
                for row in rows
            ]
        if not entries:
            return
        due = [
            (row._replace(region=self._region, regional=reply.total), reply.due)
            for row, reply in zip(rows, await import_lease.share(entries), strict=True)
            if reply.due != NOT_DUE
        ]
        import_lease.note_progress()
        if due:
            self._on_due(due)

    async def _turn(self) -> None:
        """One turn for the region. After a failure the import is left to another node for a moment."""
        import_lease = self._import_lease
        assert import_lease is not None
        self._note_loss()
        # Before a full read: only what comes after a cursor shows that the ledger has lost rows.
        is_probed = self._is_full_due and self._cursor is not None
        if is_probed and not (await self.run_once(full=False)).ok:
            import_lease.back_off()
            return
        if self._is_full_due:
            # Rows of this region may be lost without any other evidence: every node asks again which node publishes
            # what the read does not contain. By the origin's clock, so that epochs rise even if a wiped origin has
            # forgotten the last one.
            self._is_lost = False
            self._cursor = None
            epoch = max(import_lease.origin_ms(), self._sync.epoch + 1, import_lease.state.epoch + 1)
            import_lease.state = import_lease.state._replace(epoch=epoch)
        began_ms = import_lease.origin_ms()
        imported = await self.run_once()
        if not imported.ok:
            import_lease.back_off()
            return
        if import_lease.terms != self._term:
            return  # the origin has lost its lease meanwhile: what was read before that may be lost as well
        full_at_ms = began_ms if imported.full else import_lease.state.full_at_ms
        # Until the full read, the next holder must find the loss as well; and resets that the origin does not have yet.
        is_pending = self._is_lost or self._has_unsent_resets()
        import_lease.state = import_lease.state._replace(
            cursor=import_lease.state.cursor if is_pending else self._cursor or "",
            imported_at_ms=began_ms,
            full_at_ms=full_at_ms,
            regions=self._regions_live,
            lag_ms=self._lag_ms,
        )
        with self._gate:
            self._sync.apply_lease(0, self._regions_live, self._lag_ms, self._gate.now_ms())

    async def _rest(self, began_s: float, jitter: float) -> None:
        """Wait for the next turn for the region: shorter while counts change, in any region."""
        loop = asyncio.get_running_loop()
        tuning = self._tuning
        soon_s = began_s + tuning.import_busy_interval_ms / 1000 * jitter
        if not self.rows_last:
            await wait_for_event(
                self._wanted, began_s + tuning.import_hot_interval_ms / 1000 * jitter - loop.time()
            )
        await asyncio.sleep(max(0.0, soon_s - loop.time()))

    async def run(self) -> None:
        """The loop, until cancelled."""
        loop = asyncio.get_running_loop()
        tuning = self._tuning
        slow_s = tuning.import_interval_ms / 1000
        ticks = Metronome(slow_s, tuning.jitter_percent, self._random, loop.time())
        tick_s = loop.time()
        if self._import_lease is not None:
            await self._import_lease.run_once()
        while True:
            turn = self._turn_for()
            if turn is not self._for or self._is_new_term(turn):
                self._begin(turn)
            self._wanted.clear()
            if turn is _For.NONE:
                if self.calls.is_failing:
                    await (
                        self.beat_once()
                    )  # no other call would detect that the ledger answers this node again
                await wait_for_event(self._wanted, slow_s)
                continue
            if loop.time() >= tick_s:
                tick_s = ticks.next_s(loop.time())
                await self.beat_once()
            jitter = 1 + tuning.jitter_percent / 100 * (self._random.random() - 0.5)
            if turn is _For.REGION:
                began_s = loop.time()
                await self._turn()
                await self._rest(began_s, jitter)
                continue
            await self.run_once()
            interval_s = self._interval_s()
            pause_s = max(0.0, tick_s - loop.time())
            if interval_s < slow_s:
                pause_s = min(interval_s * jitter, pause_s)
            elif self._import_lease is None:
                # No other node passes resets on to this one.
                pause_s = min(tuning.reset_interval_ms / 1000, pause_s)
            with self._gate:
                self._sync.expect_import(self._gate.now_ms() + round(pause_s * 1000))
            if interval_s < slow_s:
                await asyncio.sleep(pause_s)
            else:
                await wait_for_event(self._wanted, pause_s)
