"""The clock of this machine, for adapters whose store has no clock of its own. Tests inject another one."""

from __future__ import annotations

import time

__all__ = ["WallClock"]


class WallClock:
    """Unix time as the operating system tells it."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000
