"""Spreads resets (docs/adr/0026-reset.md): through Redis (the origin) to the nodes of a region, and through the
database (the ledger) to the other regions.

The node on which a reset is made applies it to its own memory, then writes it to both, again after a failure until they
have it. Every node sees in the pulse, once a second, that there are new ones. The node that imports for its region
writes to the origin what it finds in the ledger, and to the ledger what it reads from the origin, because the node that
made the reset may have ended in between. A store that was wiped gets back what the nodes know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from tidegate.core.engine import Engine
from tidegate.core.gate import Gate
from tidegate.core.generations import RESET_NAME
from tidegate.core.model import LedgerRow
from tidegate.core.resets import Reset, ResetsReply
from tidegate.errors import DependencyError, RowsRejected
from tidegate.ports import Ledger, Origin
from tidegate.runtime.calls import Calls

__all__ = ["ResetLoop"]

logger: Final = logging.getLogger(__name__)

# Between two tries to write what was not written.
RETRY_S: Final = 1.0
# How long a caller waits for the origin and the ledger, each; then the loop keeps trying.
PATIENCE_S: Final = 1.0
# Resets in one message to the origin, and rows in one publish.
RESETS_PER_CALL: Final = 250

Place = tuple[str, str, str, int]


class ResetLoop:
    """Writes and reads the resets of one node."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        region: str,
        *,
        origin: Origin | None,
        origin_calls: Calls | None,
        ledger: Ledger | None,
        ledger_calls: Calls | None,
        is_importer: Callable[[], bool],
        on_work: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._region = region
        self._origin = origin
        self._ledger = ledger
        self._is_importer = is_importer
        # Called when requests that wait have to ask again.
        self._on_work = on_work
        # Those of reservations and of publishing: resets are few, and go where these go.
        self._origin_calls = origin_calls
        self._ledger_calls = ledger_calls
        # What the origin and the ledger have not confirmed, the newest one for each counter.
        self._for_origin: dict[Place, Reset] = {}
        self._for_ledger: dict[Place, Reset] = {}
        # The number up to which this node has read the origin's resets.
        self._since = 0
        self._wanted = asyncio.Event()

    # -- resets of other nodes

    def on_pulse(self, number: int, was_empty: bool) -> None:
        """The origin has answered a pulse: `number` is that of its last reset."""
        if was_empty or number < self._since:
            self._write_back()
        if number > self._since or self._for_origin:
            self._wanted.set()

    def _write_back(self) -> None:
        """The origin may have lost resets: this node writes those it has."""
        self._since = 0
        with self._gate:
            self._engine.resets.expire(self._gate.now_ms())
            self._add(self._for_origin, self._engine.resets.live())

    def on_import(self) -> None:
        """The import has found resets in the ledger."""
        with self._gate:
            found = self._engine.resets.take_imported()
        if self._origin is not None:
            self._add(self._for_origin, found)
        self._on_work()
        self._wanted.set()

    def on_importer(self) -> None:
        """This node imports for its region from now on: the one before may have ended before it wrote a reset to the
        ledger, which this one had read from the origin already."""
        self.on_full_import({})

    def on_full_import(self, found: dict[Place, int]) -> None:
        """A full read of the ledger has found these resets: those that are missing are written again."""
        if self._ledger is None:
            return
        with self._gate:
            self._engine.resets.expire(self._gate.now_ms())
            live = self._engine.resets.live()
        missing = [reset for reset in live if found.get(reset[:4], 0) < reset.generation]
        if missing:
            self._add(self._for_ledger, missing)
            self._wanted.set()

    @staticmethod
    def _add(waiting: dict[Place, Reset], resets: Iterable[Reset]) -> None:
        for reset in resets:
            held = waiting.get(reset[:4])
            if held is None or reset.generation > held.generation:
                waiting[reset[:4]] = reset

    # -- resets of this node

    async def spread(self, reset: Reset) -> bool:
        """Write a reset that was made here to the origin and the ledger; True if both have it now."""
        if self._origin is not None:
            self._add(self._for_origin, [reset])
        if self._ledger is not None:
            self._add(self._for_ledger, [reset])
        self._on_work()
        await self.run_once()
        is_done = self._for_origin.get(reset[:4]) != reset and self._for_ledger.get(reset[:4]) != reset
        if not is_done:
            self._wanted.set()
        return is_done

    @property
    def has_unsent(self) -> bool:
        """The origin or the ledger has not confirmed all that it has to know."""
        return bool(self._for_origin) or bool(self._for_ledger)

    def has_unsent_to_origin(self) -> bool:
        """The origin has not confirmed all that it has to know."""
        return bool(self._for_origin)

    async def run_once(self) -> bool:
        """Write what waits and read what is new; False if something is left."""
        await asyncio.gather(self._exchange_origin(), self._write_ledger())
        return not self.has_unsent

    async def _exchange_origin(self) -> None:
        origin, calls = self._origin, self._origin_calls
        if origin is None or calls is None:
            return
        try:
            more = True
            while more or self._for_origin:
                known = list(self._for_origin.values())[:RESETS_PER_CALL]
                reply = await self._ask_origin(origin, calls, known)
                self._forget(self._for_origin, known)
                self._apply_received(reply.resets)
                if reply.number < self._since:
                    self._write_back()
                else:
                    self._since = reply.number
                more = reply.more
        except DependencyError as error:
            logger.debug("resets could not be written to the origin, trying again: %s", error)

    async def _ask_origin(self, origin: Origin, calls: Calls, known: list[Reset]) -> ResetsReply:
        since = self._since
        return await calls.call(
            ["reset"],
            lambda timeout_s: origin.resets(known, since=since, timeout_s=timeout_s),
            PATIENCE_S,
        )

    def _apply_received(self, resets: list[Reset]) -> None:
        with self._gate:
            now_ms = self._gate.now_ms()
            applied = [reset for reset in resets if self._engine.resets.apply(reset, now_ms)]
        if not applied:
            return
        self._on_work()
        if self._ledger is not None and self._is_importer():
            self._add(self._for_ledger, applied)
            self._wanted.set()

    async def _write_ledger(self) -> None:
        ledger, calls = self._ledger, self._ledger_calls
        if ledger is None or calls is None:
            return
        waiting: list[Reset] = []
        try:
            while self._for_ledger:
                now_ms = self._gate.now_ms()
                waiting = list(self._for_ledger.values())[:RESETS_PER_CALL]
                rows = [self._row(reset) for reset in waiting if now_ms < reset.expires_at_ms]
                if rows:
                    await self._write_to_ledger(ledger, calls, rows)
                self._forget(self._for_ledger, waiting)
        except RowsRejected as error:
            logger.warning("the ledger refuses resets, so they do not reach other regions: %s", error)
            self._forget(self._for_ledger, waiting)
        except DependencyError as error:
            logger.debug("resets could not be written to the ledger, trying again: %s", error)

    @staticmethod
    async def _write_to_ledger(ledger: Ledger, calls: Calls, rows: list[LedgerRow]) -> None:
        await calls.call(["reset"], lambda timeout_s: ledger.publish(rows, timeout_s=timeout_s), PATIENCE_S)

    def _row(self, reset: Reset) -> LedgerRow:
        return LedgerRow(*reset[:4], RESET_NAME, self._region, reset.generation, reset.expires_at_ms)

    @staticmethod
    def _forget(waiting: dict[Place, Reset], done: Iterable[Reset]) -> None:
        for reset in done:
            if waiting.get(reset[:4]) == reset:
                del waiting[reset[:4]]

    async def run(self) -> None:
        """The loop, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if not await self.run_once():
                await asyncio.sleep(RETRY_S)
                self._wanted.set()
