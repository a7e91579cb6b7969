"""A clock that tests set by hand."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """A `Clock` that only moves when a test sets or advances it. It may step back, like real clocks."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def set(self, now_ms: int) -> None:
        """Set the time, in Unix milliseconds."""
        self._now_ms = now_ms

    def advance(self, duration_ms: int) -> int:
        """Move the time forward, and return the new time."""
        self._now_ms += duration_ms
        return self._now_ms

    def __repr__(self) -> str:
        return f"ManualClock({self._now_ms})"
