"""What a peer may ask for besides calls.

PING, SETTINGS, RST_STREAM, PRIORITY, WINDOW_UPDATE, empty DATA and unknown frames are cheap for a client to send and
cost the server a little work each. A peer may send `BUDGET_MAX` of them at once, and earns more with time and with
calls that were answered: gRPC clients send about two WINDOW_UPDATE per call, and now and then a PING. Streams that are
opened and reset before they were answered (rapid reset) earn nothing, so the budget ends them too.
"""

from __future__ import annotations

from typing import Final

BUDGET_MAX: Final = 1_000
BUDGET_PER_TICK: Final = 25
BUDGET_PER_CALL: Final = 4


class Budget:
    """Written by one connection. It looks at ticks and calls only when the budget is spent."""

    __slots__ = ("_calls", "_left", "_tick")

    def __init__(self, now: int) -> None:
        self._left = BUDGET_MAX
        self._tick = now
        self._calls = 0

    def spend(self, now: int, calls: int) -> bool:
        """One frame more, at tick `now` and after `calls` calls. False when the peer has sent too many."""
        self._left -= 1
        if self._left >= 0:
            return True
        earned = (now - self._tick) * BUDGET_PER_TICK + (calls - self._calls) * BUDGET_PER_CALL
        self._tick, self._calls = now, calls
        self._left = min(BUDGET_MAX, earned) - 1
        return self._left >= 0
