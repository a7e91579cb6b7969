"""Reads of the origin: shared, batched, bounded in time, and owned by the limiter.

A read in flight for a subject serves everybody who wants it, and belongs to nobody: a caller that goes away cancels
no read and trips no breaker. Reads of different subjects that are wanted in the same turn of the event loop travel
in one round trip. Whatever happens, a caller is answered after `read_timeout_ms`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tidegate.core.engine import Need
from tidegate.core.gate import Gate
from tidegate.core.model import Component, Tuning
from tidegate.core.origin_sync import OriginSync
from tidegate.errors import DependencyError
from tidegate.ports import Origin
from tidegate.runtime.calls import Calls

__all__ = ["Reads"]


class Reads:
    """The read side of one node's origin."""

    def __init__(self, origin: Origin, gate: Gate, sync: OriginSync, tuning: Tuning) -> None:
        self._origin = origin
        self._gate = gate
        self._sync = sync
        self._timeout_s = tuning.read_timeout_ms / 1000
        self.calls = Calls("origin_read", tuning)
        # Called when an answer has left work for another loop (counts to merge again, cells to publish).
        self.on_news: Callable[[], object] = lambda: None
        # (slot, sequence) of the subject -> its read in flight. The subject is compared, as slots are reused.
        self._flying: dict[tuple[int, int], tuple[Need, asyncio.Future[bool]]] = {}
        self._waiting: list[tuple[Need, asyncio.Future[bool]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def fetch(self, needs: Sequence[Need]) -> bool:
        """Read what is needed. True if everything was heard; False if a decision must do without."""
        futures = [self._join(need) for need in needs]
        heard = True
        for future in futures:
            # Shielded: the read goes on for the others, and for the next request, when this caller goes away.
            heard = await asyncio.shield(future) and heard
        return heard

    def _join(self, need: Need) -> asyncio.Future[bool]:
        key = (need.subject.slot, need.cells[0].sequence)
        flying = self._flying.get(key)
        if flying is not None and flying[0].subject is need.subject:
            return flying[1]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._flying[key] = (need, future)
        if not self._waiting:
            loop.call_soon(self._depart)
        self._waiting.append((need, future))
        return future

    def _depart(self) -> None:
        """Everything that was wanted in this turn goes out together."""
        leaving, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._read(leaving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, leaving: list[tuple[Need, asyncio.Future[bool]]]) -> None:
        needs = [need for need, _ in leaving]
        heard = False
        try:
            heard = await self._ask(needs)
        finally:
            for need, future in leaving:
                key = (need.subject.slot, need.cells[0].sequence)
                if self._flying.get(key, (None, None))[1] is future:
                    del self._flying[key]
                if not future.done():
                    future.set_result(heard)

    async def _ask(self, needs: list[Need]) -> bool:
        wanted: list[Component] = [component for need in needs for component in need.wanted]
        try:
            answers = await self.calls.through(
                [need.reason for need in needs],
                lambda timeout_s: self._origin.read(wanted, timeout_s=timeout_s),
                self._timeout_s,
            )
        except DependencyError:
            with self._gate:
                now_ms = self._gate.now_ms()
                for need in needs:
                    self._sync.apply_read_failure(need, now_ms)
            return False
        with self._gate:
            now_ms = self._gate.now_ms()
            at = 0
            for need in needs:
                self._sync.apply_read(need, answers[at : at + len(need.wanted)], now_ms)
                at += len(need.wanted)
        self.on_news()
        return True

    async def close(self) -> None:
        """Give up what is in flight."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
