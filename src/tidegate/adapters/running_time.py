"""Time limits that count only the time in which this process ran.

A process that gets no CPU for half a second, or whose event loop is blocked for as long, reads no answer in that time.
When it runs again, all its timers are due at once, although the answers may have been there for long. So these limits
look at the time in short steps: the part of a step that came late is not counted, and what has arrived meanwhile is
handled first. A limit is reached after `timeout_s` seconds in which the process ran, or at the next look after that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Final, TypeVar

__all__ = ["LATE_S", "STEP_S", "RunningTimeout", "RunningTimer", "result_within"]

T = TypeVar("T")

# How often the time is looked at: a small part of what a read may take (300 ms).
STEP_S: Final = 0.05
# A timer that is late by less has met a busy event loop, not one that did not run.
LATE_S: Final = 0.01


class RunningTimer:
    """Calls back after `timeout_s` seconds in which the event loop ran."""

    __slots__ = ("_callback", "_due_s", "_ends_s", "_handle", "_is_last", "_loop")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout_s: float, callback: Callable[[], object]
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._is_last = False
        now_s = loop.time()
        self._ends_s = now_s + timeout_s
        self._start(now_s)

    def _start(self, now_s: float) -> None:
        self._due_s = min(self._ends_s, now_s + STEP_S)
        self._handle = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._due_s
        if late_s > LATE_S and not self._is_last:
            # Also when nothing is left, but only once: what arrived meanwhile is read in this turn and handled in the
            # next one.
            self._is_last = self._due_s >= self._ends_s
            self._ends_s += late_s
        elif self._due_s >= self._ends_s:
            self._callback()
            return
        self._start(now_s)

    def cancel(self) -> None:
        self._handle.cancel()


class RunningTimeout:
    """`asyncio.timeout` by a `RunningTimer`."""

    __slots__ = ("_loop", "_scope", "_timeout_s", "_timer")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._scope.__aenter__()
        self._timer = RunningTimer(self._loop, self._timeout_s, self._expire)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def _expire(self) -> None:
        self._scope.reschedule(self._loop.time())


def result_within(
    future: Future[T], timeout_s: float, monotonic_s: Callable[[], float] = time.monotonic
) -> T:
    """The result of a future, for a thread that waits: `TimeoutError` after as long as this process ran."""
    ends_s = monotonic_s() + timeout_s
    is_last = False
    while True:
        due_s = min(ends_s, monotonic_s() + STEP_S)
        try:
            return future.result(max(0.0, due_s - monotonic_s()))
        except TimeoutError:
            late_s = monotonic_s() - due_s
            is_over = due_s >= ends_s
            if future.done() or is_last or (is_over and late_s <= LATE_S):
                raise
            if late_s > LATE_S:
                # The other thread has not run either: once more, for a step.
                is_last = is_over
                ends_s += late_s + (STEP_S if is_over else 0.0)
