"""Reads of the origin: shared, batched, bounded in time, and owned by the node.

One read in flight for a subject serves all callers that need it: a caller that is cancelled cancels no read and trips
no breaker. Reads of different subjects that are needed in the same turn of the event loop are one round trip. In any
case a caller is answered after `read_timeout_ms`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from tidegate.core.freshness import Need
from tidegate.core.gate import Gate
from tidegate.core.model import Component, Tuning
from tidegate.core.origin_sync import OriginSync
from tidegate.errors import DependencyError
from tidegate.ports import Origin
from tidegate.runtime.calls import Calls

__all__ = ["Reads"]


class Reads:
    """The read side of one node's origin."""

    def __init__(
        self,
        origin: Origin,
        gate: Gate,
        sync: OriginSync,
        tuning: Tuning,
        *,
        is_usable: Callable[[], bool],
        on_work: Callable[[], object],
    ) -> None:
        self._origin = origin
        self._gate = gate
        self._sync = sync
        self._timeout_s = tuning.read_timeout_ms / 1000
        self.calls: Final[Calls] = Calls("origin_read", tuning, is_usable)
        # Called when an answer has left work for other loops (counts to merge again, cells to publish).
        self._on_work = on_work
        # (slot, sequence) of the subject -> its read in flight. The subject is compared, as slots are reused.
        self._in_flight: dict[tuple[int, int], tuple[Need, asyncio.Future[bool]]] = {}
        self._waiting: list[tuple[Need, asyncio.Future[bool]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def fetch(self, needs: Sequence[Need]) -> bool:
        """Read what is needed. True if everything was answered; False if the decision must be made without it."""
        futures = [self._join(need) for need in needs]
        answered = True
        for future in futures:
            # Shielded: when this caller is cancelled, the read continues for the others and for the next request.
            answered = await asyncio.shield(future) and answered
        return answered

    def _join(self, need: Need) -> asyncio.Future[bool]:
        key = (need.subject.slot, need.cells[0].sequence)
        in_flight = self._in_flight.get(key)
        if in_flight is not None and in_flight[0].subject is need.subject:
            return in_flight[1]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._in_flight[key] = (need, future)
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((need, future))
        return future

    def _send(self) -> None:
        """Send everything that was requested in this turn of the event loop."""
        batch, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._read(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step runs no line of `_read`: its callers must not wait forever.
        task.add_done_callback(lambda _: self._finish(batch, answered=False))

    async def _read(self, batch: list[tuple[Need, asyncio.Future[bool]]]) -> None:
        answered = False
        try:
            answered = await self._ask([need for need, _ in batch])
        finally:
            self._finish(batch, answered=answered)

    def _finish(self, batch: list[tuple[Need, asyncio.Future[bool]]], *, answered: bool) -> None:
        """Answer the callers that still wait."""
        for need, future in batch:
            key = (need.subject.slot, need.cells[0].sequence)
            if self._in_flight.get(key, (None, None))[1] is future:
                del self._in_flight[key]
            if not future.done():
                future.set_result(answered)

    async def _ask(self, needs: list[Need]) -> bool:
        wanted: list[Component] = [component for need in needs for component in need.wanted]
        try:
            answers = await self.calls.call(
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
        self._on_work()
        return True

    async def close(self) -> None:
        """Cancel what is in flight."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
