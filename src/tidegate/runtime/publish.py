"""The publish loop: this region's counts to the ledger, on a tick and under pressure.

Rows go out in chunks; each chunk's "last published" is committed only after that chunk is in the ledger, so that only
a failed one is repeated. A chunk that the database refuses is bisected: the bad row is set
aside, the others are written in the same turn. The work between two awaits is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

from tidegate.core.cells import Cell, Subject
from tidegate.core.gate import Gate
from tidegate.core.ledger_sync import LedgerSync, Publication
from tidegate.core.model import LedgerRow, Tuning
from tidegate.errors import DependencyError, RowsRejected
from tidegate.ports import Ledger
from tidegate.runtime.calls import Calls
from tidegate.runtime.loops import Metronome, wait_for_event

__all__ = ["PublishLoop", "Published"]

logger: Final = logging.getLogger(__name__)

# After so many chunks in a row have failed the rest of the turn is left for the next one.
FAILED_CHUNKS_MAX: Final = 2

# Looking at a changed cell that stays below its threshold costs a fraction of what a row costs the database.
CONSIDERED_PER_ROW: Final = 20

# Subjects looked at, and rows settled, between two turns of the event loop: about half a millisecond, compiled.
SLICE_ROWS: Final = 200

# What a database holds. Several nodes that accept huge costs can exceed it together, and one refused row costs dozens
# of statements.
COUNT_MAX: Final = 2**63 - 1


Found = tuple[LedgerRow, Subject, Cell]
"""A row to publish, and what it comes from."""


class Published(NamedTuple):
    """What one turn did."""

    ok: bool
    rows: list[LedgerRow]
    """Those that stand in the ledger now."""
    chunks: list[int]
    """Rows in each chunk that was sent."""


class PublishLoop:
    """Publishes one node's view of its region."""

    def __init__(
        self,
        ledger: Ledger,
        gate: Gate,
        sync: LedgerSync,
        tuning: Tuning,
        random: Random,
        *,
        is_usable: Callable[[], bool],
        on_published: Callable[[], object],
    ) -> None:
        self._ledger = ledger
        self._gate = gate
        self._sync = sync
        self._tuning = tuning
        self._random = random
        self._timeout_s = tuning.ledger_timeout_ms / 1000
        self._pressure = asyncio.Event()
        # Called after rows were written: cells are hot, and imports should be fast.
        self._on_published = on_published
        self.calls: Final[Calls] = Calls("ledger_publish", tuning, is_usable)
        # Rows that the ledger has refused in this turn, and why: one log line for all of them.
        self._refused: list[tuple[LedgerRow, RowsRejected]] = []
        self.rows_published: int = 0
        self.turns: int = 0

    def press(self) -> None:
        """A cell has grown enough not to wait for the tick."""
        self._pressure.set()

    async def run_once(self, *, pressed_only: bool = False) -> Published:
        """One turn: everything that changed and passes the filters, or only what is under pressure."""
        self.turns += 1
        await self._sweep()
        chunks = await self._plan(pressed_only)
        done: list[LedgerRow] = []
        sizes: list[int] = []
        ok = True
        failed_in_a_row = 0
        for number, chunk in enumerate(chunks):
            try:
                if failed_in_a_row >= FAILED_CHUNKS_MAX:
                    self._give_back(chunk, 0, len(chunk.rows))
                    await asyncio.sleep(0)
                    continue
                await self._send(chunk, 0, len(chunk.rows), done, sizes)
                failed_in_a_row = 0
            except DependencyError:
                ok = False
                failed_in_a_row += 1
            except BaseException:
                # Stopped in the middle: what was not tried yet waits for the last flush.
                self._give_back_all(chunks[number + 1 :])
                raise
        if self._refused:
            row, reason = self._refused[0]
            logger.warning(
                "the ledger refuses %d rows, and they were set aside; the first is of namespace %r, sequence %d: %s",
                len(self._refused),
                row.namespace,
                row.sequence,
                reason,
            )
            self._refused.clear()
        if done:
            self._on_published()
        return Published(ok, done, sizes)

    async def _plan(self, pressed_only: bool) -> list[Publication]:
        """What to publish now, in chunks. Made in slices, so that the event loop is never held long."""
        found: list[Found] = []
        chunks: list[Publication] = []
        size = self._tuning.publish_rows_max
        try:
            waiting = self._sync.subjects_waiting(pressed_only=pressed_only)
            for start in range(0, waiting, SLICE_ROWS):
                with self._gate:
                    self._sync.collect_publish(
                        found,
                        self._gate.now_ms(),
                        min(SLICE_ROWS, waiting - start),
                        pressed_only=pressed_only,
                    )
                await asyncio.sleep(0)
            for start in range(0, len(found), size):
                chunks.append(Publication(found[start : start + size]))
                await asyncio.sleep(0)
        except BaseException:
            self._give_back(Publication(found), 0, len(found))
            raise
        return chunks

    async def _sweep(self) -> None:
        while self._sync.sweep.is_active:
            with self._gate:
                self._sync.sweep.run(1_000)
            await asyncio.sleep(0)

    async def _send(
        self, publication: Publication, start: int, end: int, done: list[LedgerRow], chunks: list[int]
    ) -> None:
        """Send the rows from `start` up to `end`; split them where the database refuses."""
        rows = publication.rows[start:end]
        if max(row.regional for row in rows) > COUNT_MAX:
            rows = [row._replace(regional=min(row.regional, COUNT_MAX)) for row in rows]
        settled = start  # rows before it are published, or handled by `_bisect`
        try:
            await self.calls.call(
                ["publish"],
                lambda timeout_s: self._ledger.publish(rows, timeout_s=timeout_s),
                self._timeout_s,
            )
            while settled < end:
                slice_end = min(settled + SLICE_ROWS, end)
                with self._gate:
                    self._sync.apply_publish(publication, settled, slice_end, self._gate.now_ms())
                settled = slice_end
                await asyncio.sleep(0)
        except RowsRejected as error:
            settled = end
            await self._bisect(publication, start, end, done, chunks, error)
            return
        finally:
            self._give_back(publication, settled, end)
        chunks.append(len(rows))
        done.extend(rows)
        self.rows_published += len(rows)

    async def _bisect(
        self,
        publication: Publication,
        start: int,
        end: int,
        done: list[LedgerRow],
        chunks: list[int],
        error: RowsRejected,
    ) -> None:
        if end - start == 1:
            self._refused.append((publication.rows[start], error))
            with self._gate:
                self._sync.set_aside(publication, start, self._gate.now_ms())
            return
        middle = (start + end) // 2
        try:
            await self._send(publication, start, middle, done, chunks)
        except BaseException:
            self._give_back(publication, middle, end)
            raise
        await self._send(publication, middle, end, done, chunks)

    def _give_back_all(self, chunks: list[Publication]) -> None:
        for chunk in chunks:
            self._give_back(chunk, 0, len(chunk.rows))

    def _give_back(self, publication: Publication, start: int, end: int) -> None:
        if start < end:
            with self._gate:
                self._sync.fail_publish(publication, start, end)

    async def run(self) -> None:
        """The loop, until cancelled: on the tick, which is short while cells are hot, and under pressure at most
        once per `pressure_interval_ms`."""
        loop = asyncio.get_running_loop()
        tuning = self._tuning
        ticks = Metronome(tuning.publish_interval_ms / 1000, tuning.jitter_percent, self._random, loop.time())
        tick_s = ticks.next_s(loop.time())
        hot_tick_s = loop.time()
        pause_s = tuning.pressure_interval_ms / 1000
        while True:
            is_hot = self._gate.now_ms() < self._sync.hot_until_ms
            due_s = min(tick_s, hot_tick_s) if is_hot else tick_s
            pressed = await wait_for_event(self._pressure, due_s - loop.time())
            self._pressure.clear()
            if not self.calls.is_usable():
                await asyncio.sleep(pause_s)
                continue
            if loop.time() >= due_s:
                if loop.time() >= tick_s:
                    tick_s = ticks.next_s(loop.time())
                considered = self._sync.subjects_waiting()
                turn = await self.run_once()
                hot_tick_s = loop.time() + self._hot_pause_s(considered, len(turn.rows))
            elif pressed:
                await self.run_once(pressed_only=True)
            await asyncio.sleep(min(pause_s, max(0.0, tick_s - loop.time())))

    def _hot_pause_s(self, considered: int, written: int) -> float:
        """Until the next tick while cells are hot: the more the last one had to do, the longer."""
        tuning = self._tuning
        jitter = 1 + tuning.jitter_percent / 100 * (self._random.random() - 0.5)
        worth = written + considered / CONSIDERED_PER_ROW
        return max(tuning.publish_hot_interval_ms / 1000 * jitter, worth / tuning.publish_hot_rows_per_s)
