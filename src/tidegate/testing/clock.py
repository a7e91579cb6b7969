"""A clock that moves only when it is told to, for tests of anything that takes a `Clock`."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """Unix time in milliseconds, as last set. It may step back, as real clocks do."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def set(self, now_ms: int) -> None:
        """It is now this time."""
        self._now_ms = now_ms

    def advance(self, duration_ms: int) -> int:
        """So much time passes; returns the new time."""
        self._now_ms += duration_ms
        return self._now_ms

    def __repr__(self) -> str:
        return f"ManualClock({self._now_ms})"
