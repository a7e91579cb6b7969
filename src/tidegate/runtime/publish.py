"""The publish loop: this region's counts to the ledger, on a tick and under pressure.

Rows go out in chunks; each chunk's "last published" is committed only after that chunk is in the ledger, so that only
a failed one is repeated. A chunk that the database refuses is bisected: the bad row is set
aside, the others are written in the same turn. The work between two awaits is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, NamedTuple

from tidegate.core.gate import Gate
from tidegate.core.generations import cell_of
from tidegate.core.ledger_sync import Found, LedgerSync, Publication
from tidegate.core.model import LedgerRow, Tuning
from tidegate.core.sharing import NOT_DUE, PRESSED, Share, ShareReply
from tidegate.errors import DependencyError, RowsRejected
from tidegate.ports import Ledger
from tidegate.runtime.calls import Calls
from tidegate.runtime.import_lease import ImportLease
from tidegate.runtime.loops import Metronome, run_sweep, wait_for_event

__all__ = ["PublishLoop", "Published", "release"]

logger: Final = logging.getLogger(__name__)

# After so many chunks in a row have failed the rest of the turn is left for the next one.
FAILED_CHUNKS_MAX: Final = 2

# Looking at a changed cell that stays below its threshold costs a fraction of what a row costs the database.
CONSIDERED_PER_ROW: Final = 20

# Subjects looked at, and rows settled, between two turns of the event loop: about half a millisecond, compiled.
SLICE_ROWS: Final = 200

# Rows freed between two turns of the event loop: a quarter of a millisecond.
FREED_ROWS: Final = 5_000

# Rows that an import may leave to the publish loop: what a full read finds comes in answers of 10,000 rows.
ENTRUSTED_MAX: Final = 50_000

# What a database holds. Several nodes that accept huge costs can exceed it together, and one refused row costs dozens
# of statements.
COUNT_MAX: Final = 2**63 - 1

# No cell is hot.
NEVER_S: Final = float("inf")


class Published(NamedTuple):
    """What one turn did."""

    ok: bool
    rows: list[LedgerRow]
    """Those that stand in the ledger now."""
    chunks: list[int]
    """Rows in each chunk that was sent."""


async def release(rows: list[LedgerRow]) -> None:
    """Free rows in slices: 50,000 at once would hold the event loop for 3 ms."""
    while rows:
        del rows[-FREED_ROWS:]
        await asyncio.sleep(0)


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
        calls: Calls,
        on_published: Callable[[], object],
        import_lease: ImportLease | None = None,
    ) -> None:
        self._ledger = ledger
        self._gate = gate
        self._sync = sync
        self._tuning = tuning
        self._random = random
        self._timeout_s = tuning.ledger_timeout_ms / 1000
        self._pressure = asyncio.Event()
        self._import_lease = import_lease
        # Rows of this region that the import found due and whose subject is not in memory, each once.
        self._entrusted: dict[tuple[str, str, str, int, int], LedgerRow] = {}
        # Some of them should not wait for a tick.
        self._has_pressed_entrusted = False
        # When the next short tick is due while cells are hot. In the past: at once.
        self._hot_tick_s = 0.0
        # Called after rows were written: cells are hot, and imports should be fast.
        self._on_published = on_published
        self.calls: Final[Calls] = calls
        # Rows that the ledger has refused in this turn, and why: one log line for all of them.
        self._refused: list[tuple[LedgerRow, RowsRejected]] = []
        self.rows_published: int = 0
        self.turns: int = 0

    def press(self) -> None:
        """A cell has grown enough not to wait for the tick."""
        self._pressure.set()

    def entrust(self, rows: Sequence[tuple[LedgerRow, int]]) -> None:
        """The origin has made this node responsible for these rows, which it imports: each with `DUE` or `PRESSED`."""
        with self._gate:
            left = [(row, due) for row, due in rows if not self._sync.entrust(row, due)]
        for row, due in left:
            if self._keep(row):
                self._has_pressed_entrusted |= due == PRESSED
        self._pressure.set()

    @property
    def is_shared(self) -> bool:
        """The origin says who publishes."""
        return self._import_lease is not None and self._import_lease.says_who_publishes

    async def run_once(self, *, pressed_only: bool = False, is_tick: bool = True) -> Published:
        """One turn: everything that changed and passes the filters, or only what is under pressure.

        While the origin answers: what it has made this node responsible for, and on the tick also what no node has
        published yet.
        """
        self.turns += 1
        await run_sweep(self._gate, self._sync.sweep)
        if self.is_shared:
            chunks = await self._plan_shared(pressed_only, is_tick)
        else:
            with self._gate:
                self._sync.forget_due()
            chunks = await self._plan(pressed_only)
        done: list[LedgerRow] = []
        sizes: list[int] = []
        ok = True
        failed_in_a_row = 0
        while chunks:
            # Not kept: to free all of them at once would hold the event loop.
            chunk = chunks.pop(0)
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
                self._give_back_all(chunks)
                raise
        if self._refused:
            row, reason = self._refused[0]
            logger.warning(
                "the ledger refuses %d rows, and they were set aside; the first is of namespace %r, sequence %d: %s",
                len(self._refused),
                row.namespace,
                cell_of(row.sequence, row.duration_ms)[0],
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

    async def _plan_shared(self, pressed_only: bool, is_tick: bool) -> list[Publication]:
        """What the origin leaves to this node, in chunks."""
        now_ms = self._gate.now_ms()
        entrusted = self._entrusted
        self._entrusted = {}
        self._has_pressed_entrusted = False
        found: list[Found] = [(row, None, None) for row in entrusted.values() if now_ms < row.expires_at_ms]
        pending = self._sync.pending
        pending.has_pressed_due = False
        kept: list[Publication] = []
        chunks: list[Publication] = []
        try:
            waiting = len(pending.due)
            for start in range(0, waiting, SLICE_ROWS):
                with self._gate:
                    count = min(SLICE_ROWS, waiting - start)
                    self._sync.collect_due(found, self._gate.now_ms(), count, pressed_only=pressed_only)
                await asyncio.sleep(0)
            waiting = self._sync.subjects_waiting() if is_tick and not pressed_only else 0
            for start in range(0, waiting, SLICE_ROWS):
                with self._gate:
                    count = min(SLICE_ROWS, waiting - start)
                    self._sync.collect_publish(found, self._gate.now_ms(), count, is_shared=True)
                await asyncio.sleep(0)
            size = self._tuning.publish_rows_max
            chunks = [Publication(found[start : start + size]) for start in range(0, len(found), size)]
            while chunks:
                kept.append(await self._claim(chunks[0]))
                del chunks[0]
        except DependencyError:
            self._ask_again(chunks)
        except BaseException:
            self._ask_again(chunks or [Publication(found)])
            self._give_back_all(kept)
            raise
        return [chunk for chunk in kept if chunk.rows]

    async def _claim(self, chunk: Publication) -> Publication:
        """The rows of the chunk that this node has to publish, as the origin counts them."""
        left: list[Found] = []
        for start in range(0, len(chunk.rows), SLICE_ROWS):
            end = min(start + SLICE_ROWS, len(chunk.rows))
            replies = await self._share(chunk, start, end, is_published=False)
            with self._gate:
                for i, reply in enumerate(replies, start):
                    if self._sync.apply_claim(chunk, i, reply.total, reply.published, reply.due):
                        left.append((chunk.rows[i], chunk.subjects[i], chunk.cells[i]))
        return Publication(left)

    async def _confirm(self, chunk: Publication, start: int, end: int) -> None:
        """Write to the origin what is in the ledger now, and read what has been counted since."""
        for first in range(start, end, SLICE_ROWS):
            last = min(first + SLICE_ROWS, end)
            try:
                replies = await self._share(chunk, first, last, is_published=True)
            except DependencyError:
                return  # this node's responsibility ends by itself, and the import finds the rows
            again: list[tuple[LedgerRow, int]] = []
            with self._gate:
                now_ms = self._gate.now_ms()
                for i, reply in enumerate(replies, first):
                    self._sync.apply_published(chunk, i, reply.total, reply.published, reply.due, now_ms)
                    if chunk.cells[i] is None and reply.due != NOT_DUE:
                        again.append((chunk.rows[i]._replace(regional=reply.total), reply.due))
            if again:
                self.entrust(again)

    async def _share(
        self, chunk: Publication, start: int, end: int, *, is_published: bool
    ) -> list[ShareReply]:
        assert self._import_lease is not None
        entries = [
            Share(
                chunk.digest(i),
                row.duration_ms,
                cell_of(row.sequence, row.duration_ms)[0],
                "",
                row.regional if is_published else 0,
                self._import_lease.node_id,
                self._sync.epoch,
                self._sync.generation_of(row),
            )
            for i, row in enumerate(chunk.rows[start:end], start)
        ]
        return await self._import_lease.share(entries)

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
        if self.is_shared:
            await self._confirm(publication, start, end)

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

    def _ask_again(self, chunks: list[Publication]) -> None:
        """The origin has not said who publishes these."""
        for chunk in chunks:
            with self._gate:
                self._sync.fail_claim(chunk)
            self._keep_entrusted(chunk, 0, len(chunk.rows))

    def _keep_entrusted(self, publication: Publication, start: int, end: int) -> None:
        """Rows without a subject in memory wait here for the next turn."""
        for i in range(start, end):
            if publication.subjects[i] is None:
                self._keep(publication.rows[i])

    def _keep(self, row: LedgerRow) -> bool:
        key = (row.workspace, row.namespace, row.identifier, row.duration_ms, row.sequence)
        has_room = len(self._entrusted) < ENTRUSTED_MAX or key in self._entrusted
        if has_room:
            self._entrusted[key] = row
        return has_room

    def _give_back_all(self, chunks: list[Publication]) -> None:
        for chunk in chunks:
            self._give_back(chunk, 0, len(chunk.rows))

    def _give_back(self, publication: Publication, start: int, end: int) -> None:
        if start < end:
            with self._gate:
                self._sync.fail_publish(publication, start, end)
            self._keep_entrusted(publication, start, end)

    async def run(self) -> None:
        """The loop, until cancelled: on the tick, which is short while cells are hot, and under pressure at most
        once per `pressure_interval_ms`."""
        loop = asyncio.get_running_loop()
        tuning = self._tuning
        ticks = Metronome(tuning.publish_interval_ms / 1000, tuning.jitter_percent, self._random, loop.time())
        tick_s = ticks.next_s(loop.time())
        pause_s = tuning.pressure_interval_ms / 1000
        while True:
            due_s = self._due_s(tick_s)
            pressed = await wait_for_event(self._pressure, due_s - loop.time())
            self._pressure.clear()
            if self.is_shared:
                with self._gate:
                    self._sync.drop_pressed()
                pressed = self._sync.pending.has_pressed_due or self._has_pressed_entrusted
                due_s = self._due_s(tick_s)
            if not self.calls.is_usable():
                await asyncio.sleep(pause_s)
                continue
            if loop.time() >= due_s:
                is_tick = loop.time() >= tick_s
                if is_tick:
                    tick_s = ticks.next_s(loop.time())
                considered = self._sync.subjects_waiting() if is_tick or not self.is_shared else 0
                turn = await self.run_once(is_tick=is_tick)
                if is_tick and not turn.ok:
                    # The origin lets the first node that asks publish. Those that ask soon after this one go before it.
                    tick_s += tuning.publish_interval_ms / 2000
                self._hot_tick_s = loop.time() + self._hot_pause_s(considered, len(turn.rows))
            elif pressed:
                turn = await self.run_once(pressed_only=True)
            else:
                continue  # woken without work: the next cell under pressure must not wait
            await release(turn.rows)
            await asyncio.sleep(min(pause_s, max(0.0, tick_s - loop.time())))

    def _due_s(self, tick_s: float) -> float:
        """When the next tick is. The nodes of a region become responsible in turn: each collects for one short tick,
        so that together they write no more often than one."""
        if not self._is_hot:
            if self.is_shared:
                self._hot_tick_s = NEVER_S
            return tick_s
        if self._hot_tick_s == NEVER_S:
            self._hot_tick_s = asyncio.get_running_loop().time() + self._hot_pause_s(0, 0)
        return min(tick_s, self._hot_tick_s)

    @property
    def _is_hot(self) -> bool:
        """There is something to publish before the next tick."""
        if self.is_shared:
            return bool(self._sync.pending.due) or bool(self._entrusted)
        return self._gate.now_ms() < self._sync.hot_until_ms

    def _hot_pause_s(self, considered: int, written: int) -> float:
        """Until the next tick while cells are hot: the more the last one had to do, the longer."""
        tuning = self._tuning
        jitter = 1 + tuning.jitter_percent / 100 * (self._random.random() - 0.5)
        worth = written + considered / CONSIDERED_PER_ROW
        return max(tuning.publish_hot_interval_ms / 1000 * jitter, worth / tuning.publish_hot_rows_per_s)
