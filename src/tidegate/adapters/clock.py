"""The clock of this machine: the one place that reads Unix time."""

from __future__ import annotations

from time import time_ns

__all__ = ["WallClock", "now_ms"]


def now_ms() -> int:
    """Unix time in whole milliseconds."""
    return time_ns() // 1_000_000


class WallClock:
    """The `Clock` of everything outside of tests and simulations."""

    def now_ms(self) -> int:
        return now_ms()
