"""Reads of the origin: shared, batched, bounded in time, and owned by the node.

One read in flight for a subject serves all callers that need it: a caller that is cancelled cancels no read and trips
no breaker. Reads of different subjects that are needed in the same turn of the event loop are one round trip. In any
case a caller is answered after `read_timeout_ms`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from tidegate.core.cells import Subject
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
        # (subject, sequence) -> its read in flight.
        self._in_flight: dict[tuple[Subject, int], asyncio.Future[bool]] = {}
        # What is sent at the end of this turn, and the answer to all of it.
        self._waiting: list[Need] = []
        self._next: asyncio.Future[bool] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def fetch(self, needs: Sequence[Need]) -> bool:
        """Read what is needed. True if everything was answered; False if the decision must be made without it."""
        answered = True
        # In their order, each once: needs of one turn have one future.
        for future in dict.fromkeys([self._join(need) for need in needs]):
            # Shielded: when this caller is cancelled, the read continues for the others and for the next request.
            answered = await asyncio.shield(future) and answered
        return answered

    def _join(self, need: Need) -> asyncio.Future[bool]:
        key = (need.subject, need.cells[0].sequence)
        in_flight = self._in_flight.get(key)
        if in_flight is not None:
            return in_flight
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_soon(self._send)
        self._in_flight[key] = self._next
        self._waiting.append(need)
        return self._next

    def _send(self) -> None:
        """Send everything that was requested in this turn of the event loop."""
        needs, self._waiting = self._waiting, []
        future, self._next = self._next, None
        assert future is not None
        task = asyncio.get_running_loop().create_task(self._read(needs, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step runs no line of `_read`: its callers must not wait forever.
        task.add_done_callback(lambda _: self._finish(needs, future, answered=False))

    async def _read(self, needs: list[Need], future: asyncio.Future[bool]) -> None:
        answered = False
        try:
            answered = await self._ask(needs)
        finally:
            self._finish(needs, future, answered=answered)

    def _finish(self, needs: list[Need], future: asyncio.Future[bool], *, answered: bool) -> None:
        """Answer the callers, unless they were."""
        if future.done():
            return
        for need in needs:
            key = (need.subject, need.cells[0].sequence)
            if self._in_flight.get(key) is future:
                del self._in_flight[key]
        future.set_result(answered)

    async def _ask(self, needs: list[Need]) -> bool:
        with self._gate:
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
